"""Pipelines that never drain: schedules, one step of gradient delay, error feedback, and their exact emulator."""
