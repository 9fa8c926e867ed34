// Filters of the claims ledger: a text box and one select for each column that has a few values.
(function () {
  "use strict";
  function setUp(box) {
    var table = box.querySelector("table"), rows = Array.prototype.slice.call(table.tBodies[0].rows);
    var count = box.querySelector(".book-count"), fields = box.querySelectorAll("[data-column], [data-text]");
    function apply() {
      var shown = 0;
      rows.forEach(function (row) {
        var keep = Array.prototype.every.call(fields, function (field) {
          if (!field.value) return true;
          if (field.dataset.column) return row.dataset[field.dataset.column] === field.value;
          return row.textContent.toLowerCase().indexOf(field.value.toLowerCase()) >= 0;
        });
        row.hidden = !keep;
        shown += keep;
      });
      count.textContent = shown + " of " + rows.length + " claims";
    }
    fields.forEach(function (field) { field.addEventListener("input", apply); });
    apply();
  }
  document.addEventListener("DOMContentLoaded", function () {
    document.querySelectorAll(".book-ledger.filters").forEach(setUp);
  });
})();
