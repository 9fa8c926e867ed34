"""Where the Chromium is that prints and tests the built book."""

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def find_chromium() -> str | None:
    """Return the path of the first Chromium or Chrome on the PATH, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)
