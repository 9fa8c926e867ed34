// Draws every figure of a page with the local plotly.js, with accessible controls, in the page's colours.
(function () {
  "use strict";

  function colours() {
    var style = getComputedStyle(document.documentElement);
    var pick = function (name, otherwise) { return style.getPropertyValue(name).trim() || otherwise; };
    return {
      family: getComputedStyle(document.body).fontFamily,
      text: pick("--pst-color-text-base", "#222"),
      muted: pick("--pst-color-text-muted", "#555"),
      grid: pick("--book-grid", "rgba(127,127,127,.25)"),
      surface: pick("--pst-color-surface", "#f5f5f5"),
    };
  }

  function themed(layout) {
    var c = colours(), change = { "font.color": c.text, "font.family": c.family, "hoverlabel.bgcolor": c.surface, "hoverlabel.font.color": c.text };
    Object.keys(layout).concat(["xaxis", "yaxis"]).forEach(function (key) {
      if (/^[xy]axis\d*$/.test(key)) {
        change[key + ".gridcolor"] = c.grid;
        change[key + ".linecolor"] = c.grid;
        change[key + ".zerolinecolor"] = c.grid;
      }
    });
    return change;
  }

  function cell(value) {
    var text = value === null || value === undefined ? "" : String(value);
    return /[",\n]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
  }

  // plotly.py packs numpy arrays as base64.
  function values(data) {
    if (!data || !data.bdata) return data || [];
    var kinds = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };
    var bytes = Uint8Array.from(atob(data.bdata), function (c) { return c.charCodeAt(0); });
    var flat = Array.from(new kinds[data.dtype](bytes.buffer));
    var shape = String(data.shape || "").split(",").map(Number);
    if (shape.length !== 2) return flat;
    return Array.from({ length: shape[0] }, function (_, i) { return flat.slice(i * shape[1], (i + 1) * shape[1]); });
  }

  function csv(figure) {
    var rows = [["trace", "setting", "x", "y", "z", "base"]];
    figure.plot.data.forEach(function (trace) {
      var setting = Object.entries(trace.meta || {}).map(function (e) { return e.join("="); }).join("; ");
      var xs = values(trace.x), ys = values(trace.y), zs = values(trace.z), bases = values(trace.base);
      var n = Math.max(xs.length, ys.length, zs.length);
      for (var i = 0; i < n; i++) {
        var z = zs[i];
        if (z && typeof z === "object") {
          for (var j = 0; j < z.length; j++) rows.push([trace.name, setting, xs[j], ys[i], z[j]]);
        } else {
          rows.push([trace.name, setting, xs[i], ys[i], z, bases[i]]);
        }
      }
    });
    return rows.map(function (r) { return r.map(cell).join(","); }).join("\n") + "\n";
  }

  function Figure(element, index) {
    this.element = element;
    this.index = index;
    this.plot = element.querySelector(".book-plot");
    this.source = JSON.parse(element.querySelector(".book-data").textContent);
    this.meta = this.source.layout.meta || {};
    this.state = {};
    var self = this;
    (this.meta.controls || []).forEach(function (c) { self.state[c.key] = c.initial; });
  }

  Figure.prototype.shown = function (trace) {
    var meta = trace.meta || {}, state = this.state;
    return Object.keys(state).every(function (key) { return !(key in meta) || meta[key] === state[key]; });
  };

  Figure.prototype.draw = function () {
    var layout = Object.assign({}, this.source.layout, { autosize: true });
    var self = this;
    return Plotly.newPlot(this.plot, this.source.data, layout, {
      responsive: true, displaylogo: false, displayModeBar: false,
    }).then(function () {
      self.tools();
      self.retheme();
      self.element.dataset.drawn = String(self.plot.data.length);
    });
  };

  Figure.prototype.retheme = function () {
    if (this.plot.layout) Plotly.relayout(this.plot, themed(this.plot.layout));
  };

  Figure.prototype.update = function () {
    var self = this;
    var visible = this.source.data.map(function (trace) { return self.shown(trace); });
    Plotly.restyle(this.plot, { visible: visible });
  };

  Figure.prototype.tools = function () {
    var self = this, box = this.element.querySelector(".book-controls");
    (this.meta.controls || []).forEach(function (control, k) {
      var id = "book-" + self.index + "-" + k, label = document.createElement("label"), input, output;
      label.htmlFor = id;
      label.textContent = control.label;
      if (control.kind === "range") {
        input = document.createElement("input");
        input.type = "range";
        input.min = 0;
        input.max = control.values.length - 1;
        input.step = 1;
        input.value = control.values.indexOf(control.initial);
        output = document.createElement("output");
        output.htmlFor = id;
        output.textContent = control.initial;
        input.setAttribute("aria-valuetext", String(control.initial));
        input.addEventListener("input", function () {
          var value = control.values[Number(input.value)];
          self.state[control.key] = value;
          output.textContent = value;
          input.setAttribute("aria-valuetext", String(value));
          self.update();
        });
      } else {
        input = document.createElement("select");
        control.values.forEach(function (value, i) {
          var option = document.createElement("option");
          option.value = i;
          option.textContent = value;
          option.selected = value === control.initial;
          input.appendChild(option);
        });
        input.addEventListener("change", function () {
          self.state[control.key] = control.values[Number(input.value)];
          self.update();
        });
      }
      input.id = id;
      var group = document.createElement("span");
      group.className = "book-control book-" + control.kind;
      group.append(label, input);
      if (output) group.append(output);
      box.appendChild(group);
    });
    var button = document.createElement("button");
    button.type = "button";
    button.className = "book-csv";
    button.textContent = "Data (CSV)";
    button.addEventListener("click", function () {
      var link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([csv(self)], { type: "text/csv" }));
      link.download = "figure-" + (self.index + 1) + ".csv";
      link.click();
      setTimeout(function () { URL.revokeObjectURL(link.href); }, 1000);
    });
    this.element.querySelector(".book-caption").appendChild(button);
  };

  function start() {
    var figures = Array.prototype.map.call(document.querySelectorAll(".book-figure"), function (el, i) { return new Figure(el, i); });
    // One after another, those on the screen first, so that a page with many figures stays responsive.
    var distance = function (figure) {
      var box = figure.element.getBoundingClientRect();
      return box.bottom < 0 ? innerHeight - box.bottom : box.top;
    };
    var queue = figures.slice().sort(function (a, b) { return distance(a) - distance(b); });
    (function next() {
      var figure = queue.shift();
      if (figure) figure.draw().then(function () { setTimeout(next, 0); });
    })();
    new MutationObserver(function () {
      figures.forEach(function (figure) { figure.retheme(); });
    }).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    window.addEventListener("beforeprint", function () {
      figures.forEach(function (figure) { if (figure.plot.layout) Plotly.Plots.resize(figure.plot); });
    });
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
