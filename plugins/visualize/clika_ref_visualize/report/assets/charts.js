// Plots of sensitivities and thresholds, and histograms of activations.

function showSensitivity(host) {
  const layers = report.nodes.map((node, index) => ({ node, index })).filter(({ node }) => node.sensitivity !== null);
  const threshold = report.chosen ? report.chosen.threshold : null;
  const positive = [...layers.map(({ node }) => node.sensitivity), threshold || 0].filter((x) => x > 0);
  if (!layers.length || !positive.length) return host.append(createNote(report.unavailable.sensitivity || "No sensitivity was estimated."));
  const low = Math.min(...positive) / 1.6;
  const high = Math.max(...positive) * 1.6;
  const frame = createElement("div", { class: "plot" });
  host.append(createLegend([...new Set(layers.map(({ node }) => node.state))]), frame);
  drawOnResize(frame, (width) => {
    const [left, right, top, bottom, height] = [58, 14, 10, 40, 294];
    const x = linear(-0.5, layers.length - 0.5, left, width - right);
    const y = logarithmic(low, high, height - bottom, top);
    const marks = ticks(1, layers.length, 10).filter(Number.isInteger);
    const svg = createSvg("svg", { width, height, role: "group", "aria-label": "Sensitivity of each layer" },
      axisY(y, powers(low, high), left, powerText, width - left - right),
      axisX((index) => x(index - 1), marks, height - bottom, formatCount),
      createSvg("text", { class: "axis-title", x: 12, y: top + 4, transform: `rotate(-90 12 ${top + 4})`, "text-anchor": "end" }, "QS"),
      createSvg("text", { class: "axis-title", x: width - right, y: height - 6, "text-anchor": "end" }, "layers, in execution order"));
    if (threshold) {
      svg.append(createSvg("line", { class: "threshold", x1: left, x2: width - right, y1: y(threshold), y2: y(threshold) }),
        createSvg("text", { class: "threshold-text", x: width - right - 4, y: y(threshold) - 5, "text-anchor": "end" }, `threshold ${formatNumber(threshold)}`));
    }
    layers.forEach(({ node, index }, position) => {
      const dot = createSvg("circle", { class: `dot ${node.state}`, cx: x(position), cy: y(node.sensitivity || low), r: layers.length > 400 ? 3 : 4.5,
        tabindex: 0, role: "button", "aria-label": `${formatTitle(node)}: QS ${formatNumber(node.sensitivity)}` });
      const lines = [formatTitle(node), `QS ${formatNumber(node.sensitivity)}`, STATES[node.state], node.reason];
      dot.addEventListener("pointermove", (event) => showTip(event, lines.filter(Boolean)));
      dot.addEventListener("pointerleave", hideTip);
      dot.addEventListener("click", () => openNode(index, dot));
      dot.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") openNode(index, dot);
      });
      svg.append(dot);
    });
    return svg;
  });
}

function showThresholds(host) {
  const rows = report.what_if;
  if (!rows.length) return host.append(createNote(report.unavailable.what_if || "No layer can be quantized. The threshold has no effect."));
  const chosen = report.chosen;
  const positive = [...rows.map((row) => row.threshold), chosen.threshold || 0].filter((x) => x > 0);
  const low = Math.min(...positive, 1) / 2;
  const high = Math.max(...positive, low * 4) * 2;
  const readout = createElement("p", { class: "readout", role: "status" });
  const frame = createElement("div", { class: "plot" });
  host.append(frame, readout);
  const showRow = (row) => {
    readout.textContent = row
      ? `At ${formatNumber(row.threshold)}: ${formatPlural(row.layers, "quantized layer")}, ${formatBytes(row.bytes)}, ${formatDecibels(row.sqnr) || "SQNR unknown"}`
      : `Chosen: ${chosen.threshold === null ? "all supported layers" : `threshold ${formatNumber(chosen.threshold)}`}, ${formatCount(chosen.layers)} of ${formatPlural(chosen.total_layers, "layer")} quantized, ${formatBytes(chosen.bytes)}${chosen.sqnr === null ? "" : `, ${formatDecibels(chosen.sqnr)}`}`;
  };
  showRow(null);
  drawOnResize(frame, (width) => drawThresholds(width, rows, chosen, low, high, showRow));
  makeTable(getById("thresholds-table"), "Thresholds", [
    { title: "Threshold", numeric: true, value: (row) => row.threshold, cell: (row) => formatNumber(row.threshold) },
    { title: "Quantized layers", numeric: true, value: (row) => row.layers, cell: (row) => formatCount(row.layers) },
    { title: "Weights and constants", numeric: true, value: (row) => row.bytes, cell: (row) => formatBytes(row.bytes) },
    { title: "Predicted SQNR", numeric: true, value: (row) => row.sqnr, cell: (row) => formatDecibels(row.sqnr) },
  ], rows);
}

function drawThresholds(width, rows, chosen, low, high, showRow) {
  const [left, right, panel, gap, top, bottom] = [72, 16, 130, 34, 16, 40];
  const height = top + 2 * panel + gap + bottom;
  const x = logarithmic(low, high, left, width - right);
  const sizes = rows.map((row) => row.bytes);
  const ratios = rows.map((row) => row.sqnr).filter((sqnr) => sqnr !== null);
  const size = linear(0, Math.max(report.bytes_before, ...sizes) * 1.04, top + panel, top);
  const below = top + panel + gap;
  const [lowest, highest] = ratios.length ? [Math.min(...ratios), Math.max(...ratios)] : [0, 1];
  const pad = (highest - lowest || 4) * 0.08;
  const ratio = linear(lowest - pad, highest + pad, below + panel, below);
  const start = [[x(low), size(report.bytes_before)]];
  const bySize = [...start, ...rows.map((row) => [x(row.threshold), size(row.bytes)]), [width - right, size(sizes.at(-1))]];
  const withRatio = rows.filter((row) => row.sqnr !== null);
  const byRatio = withRatio.length ? [...withRatio.map((row) => [x(row.threshold), ratio(row.sqnr)]), [width - right, ratio(withRatio.at(-1).sqnr)]] : [];
  const svg = createSvg("svg", { width, height, role: "img", "aria-label": "Size and SQNR by threshold; the table below lists the numbers" },
    axisY(size, ticks(0, Math.max(report.bytes_before, ...sizes), 4), left, formatBytes, width - left - right),
    axisY(ratio, ticks(lowest - pad, highest + pad, 4), left, (tick) => `${formatNumber(tick)} dB`, width - left - right),
    axisX(x, powers(low, high), below + panel, powerText, 2 * panel + gap),
    createSvg("text", { class: "axis-title", x: left, y: top - 5 }, "weights and constants"),
    createSvg("text", { class: "axis-title", x: left, y: below - 7 }, "predicted SQNR"),
    createSvg("text", { class: "axis-title", x: width - right, y: height - 6, "text-anchor": "end" }, "threshold"),
    createSvg("path", { class: "area size", d: `${steps(bySize)}V${top + panel}H${left}Z` }),
    createSvg("path", { class: "curve size", d: steps(bySize) }),
    createSvg("path", { class: "curve sqnr", d: steps(byRatio) }));
  const selected = chosen.threshold || rows.at(-1).threshold;
  svg.append(createSvg("line", { class: "threshold", x1: x(selected), x2: x(selected), y1: top, y2: below + panel }),
    createSvg("text", { class: "threshold-text", x: x(selected) + 6, y: top + 12 }, "chosen"),
    createSvg("circle", { class: "chosen", cx: x(selected), cy: size(chosen.bytes), r: 5.5 }));
  if (chosen.sqnr !== null) svg.append(createSvg("circle", { class: "chosen", cx: x(selected), cy: ratio(chosen.sqnr), r: 5.5 }));
  const cross = createSvg("line", { class: "cross", y1: top, y2: below + panel, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    const position = event.clientX - svg.getBoundingClientRect().left;
    const row = rows.filter((one) => x(one.threshold) <= position).at(-1) || rows[0];
    cross.setAttribute("x1", x(row.threshold));
    cross.setAttribute("x2", x(row.threshold));
    cross.setAttribute("visibility", "visible");
    showRow(row);
  });
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    showRow(null);
  });
  return svg;
}

// The histogram of an activation: the quantized range is shaded, and the observed min and max are marked.
function drawHistogram(value, width, isLogarithmic) {
  const { observed, quantized } = value;
  const [left, right, top, bottom, height] = [10, 10, 8, 34, 150];
  const { start, width: step, counts } = observed.histogram;
  const limits = [start, start + step * counts.length, observed.low, observed.high, ...(quantized ? [quantized.low, quantized.high] : [])];
  const [low, high] = [Math.min(...limits), Math.max(...limits)];
  const x = linear(low, high, left, width - right);
  const highest = Math.max(...counts, 1);
  const y = isLogarithmic ? logarithmic(0.5, highest, height - bottom, top) : linear(0, highest, height - bottom, top);
  const svg = createSvg("svg", { width, height, class: "histogram", role: "img", "aria-label": `Histogram of ${value.name}` });
  if (quantized) {
    svg.append(createSvg("rect", { class: "quantized-range", x: x(quantized.low), y: top, width: Math.max(x(quantized.high) - x(quantized.low), 1), height: height - bottom - top }),
      createSvg("line", { class: "range-limit", x1: x(quantized.low), x2: x(quantized.low), y1: top, y2: height - bottom }),
      createSvg("line", { class: "range-limit", x1: x(quantized.high), x2: x(quantized.high), y1: top, y2: height - bottom }));
  }
  counts.forEach((amount, index) => {
    if (!amount) return;
    const from = x(start + index * step);
    const wide = Math.max(x(start + (index + 1) * step) - from - 0.5, 0.6);
    const column = createSvg("rect", { class: "column", x: from, y: y(amount), width: wide, height: Math.max(height - bottom - y(amount), 0.5) });
    const lines = [`${formatNumber(start + index * step)} to ${formatNumber(start + (index + 1) * step)}`, formatPlural(amount, "element")];
    column.addEventListener("pointermove", (event) => showTip(event, lines));
    column.addEventListener("pointerleave", hideTip);
    svg.append(column);
  });
  for (const limit of [observed.low, observed.high]) svg.append(createSvg("path", { class: "min-max", d: `M${x(limit)},${height - bottom}l-4,7h8z` }));
  const marks = ticks(low, high, Math.max(4, Math.floor(width / 55)));
  svg.append(createSvg("line", { class: "ground", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    axisX(x, marks, height - bottom + 3, formatNumber));
  return svg;
}

// A histogram of a few pixels, for a table row.
function drawSparkline(value) {
  if (!value.observed || !value.observed.histogram.counts.length) return "";
  const { counts } = value.observed.histogram;
  const top = Math.log1p(Math.max(...counts));
  const columns = counts.map((amount, index) => (amount ? `M${index + 0.5},20V${(20 - (19 * Math.log1p(amount)) / top).toFixed(1)}` : ""));
  return createSvg("svg", { class: "spark", viewBox: `0 0 ${counts.length} 20`, width: 96, height: 20, preserveAspectRatio: "none", "aria-hidden": "true" },
    createSvg("path", { d: columns.join("") }));
}
