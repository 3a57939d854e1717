// The plots of sensitivities and thresholds, and histograms of values.

function showSensitivity(host) {
  const layers = report.nodes.map((node, place) => ({ node, place })).filter(({ node }) => node.sensitivity !== null);
  const threshold = report.chosen ? report.chosen.threshold : null;
  const positive = [...layers.map(({ node }) => node.sensitivity), threshold || 0].filter((x) => x > 0);
  if (!layers.length || !positive.length) return host.append(note(report.missing.sensitivity || "No layer was weighed."));
  const low = Math.min(...positive) / 1.6;
  const high = Math.max(...positive) * 1.6;
  const frame = make("div", { class: "plot" });
  host.append(legend([...new Set(layers.map(({ node }) => node.state))]), frame);
  plotted(frame, (width) => {
    const [left, right, top, bottom, height] = [58, 14, 10, 40, 294];
    const x = linear(-0.5, layers.length - 0.5, left, width - right);
    const y = logarithmic(low, high, height - bottom, top);
    const whole = ticks(1, layers.length, 10).filter(Number.isInteger);
    const svg = draw("svg", { width, height, role: "group", "aria-label": "Sensitivity of each layer" },
      axisY(y, powers(low, high), left, powerText, width - left - right),
      axisX((place) => x(place - 1), whole, height - bottom, count),
      draw("text", { class: "axis-title", x: 12, y: top + 4, transform: `rotate(-90 12 ${top + 4})`, "text-anchor": "end" }, "QS"),
      draw("text", { class: "axis-title", x: width - right, y: height - 6, "text-anchor": "end" }, "layers, in the order in which they are computed"));
    if (threshold) {
      svg.append(draw("line", { class: "threshold", x1: left, x2: width - right, y1: y(threshold), y2: y(threshold) }),
        draw("text", { class: "threshold-text", x: width - right - 4, y: y(threshold) - 5, "text-anchor": "end" }, `threshold ${significant(threshold)}`));
    }
    layers.forEach(({ node, place }, index) => {
      const dot = draw("circle", { class: `dot ${node.state}`, cx: x(index), cy: y(node.sensitivity || low), r: layers.length > 400 ? 3 : 4.5,
        tabindex: 0, role: "button", "aria-label": `${titleOf(node)}: QS ${significant(node.sensitivity)}` });
      const told = [titleOf(node), `QS ${significant(node.sensitivity)}`, STATES[node.state], node.reason];
      dot.addEventListener("pointermove", (event) => showTip(event, told.filter(Boolean)));
      dot.addEventListener("pointerleave", hideTip);
      dot.addEventListener("click", () => openNode(place, dot));
      dot.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") openNode(place, dot);
      });
      svg.append(dot);
    });
    return svg;
  });
}

function showThresholds(host) {
  const rows = report.what_if;
  if (!rows.length) return host.append(note(report.missing.what_if || "No layer can be quantized, so that no threshold makes a difference."));
  const chosen = report.chosen;
  const positive = [...rows.map((row) => row.threshold), chosen.threshold || 0].filter((x) => x > 0);
  const low = Math.min(...positive, 1) / 2;
  const high = Math.max(...positive, low * 4) * 2;
  const told = make("p", { class: "readout", role: "status" });
  const frame = make("div", { class: "plot" });
  host.append(frame, told);
  const say = (row) => {
    told.textContent = row
      ? `At ${significant(row.threshold)}: ${plural(row.layers, "layer")} ${SMALL}, ${bytes(row.bytes)}, ${decibels(row.sqnr) || "no change"}`
      : `Chosen: ${chosen.threshold === null ? "whatever can be" : `threshold ${significant(chosen.threshold)}`}, ${count(chosen.layers)} of ${plural(chosen.of_layers, "layer")} ${SMALL}, ${bytes(chosen.bytes)}${chosen.sqnr === null ? "" : `, ${decibels(chosen.sqnr)}`}`;
  };
  say(null);
  plotted(frame, (width) => thresholdPlot(width, rows, chosen, low, high, say));
  makeTable(at("thresholds-table"), "Thresholds", [
    { title: "Threshold", numeric: true, value: (row) => row.threshold, cell: (row) => significant(row.threshold) },
    { title: `Layers ${SMALL}`, numeric: true, value: (row) => row.layers, cell: (row) => count(row.layers) },
    { title: "Weights and constants", numeric: true, value: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
    { title: "Predicted SQNR", numeric: true, value: (row) => row.sqnr, cell: (row) => decibels(row.sqnr) },
  ], rows);
}

function thresholdPlot(width, rows, chosen, low, high, say) {
  const [left, right, panel, gap, top, bottom] = [72, 16, 130, 34, 16, 40];
  const height = top + 2 * panel + gap + bottom;
  const x = logarithmic(low, high, left, width - right);
  const sizes = rows.map((row) => row.bytes);
  const ratios = rows.map((row) => row.sqnr).filter((sqnr) => sqnr !== null);
  const size = linear(0, Math.max(report.bytes_before, ...sizes) * 1.04, top + panel, top);
  const below = top + panel + gap;
  const [least, most] = ratios.length ? [Math.min(...ratios), Math.max(...ratios)] : [0, 1];
  const pad = (most - least || 4) * 0.08;
  const ratio = linear(least - pad, most + pad, below + panel, below);
  const start = [[x(low), size(report.bytes_before)]];
  const bySize = [...start, ...rows.map((row) => [x(row.threshold), size(row.bytes)]), [width - right, size(sizes.at(-1))]];
  const withRatio = rows.filter((row) => row.sqnr !== null);
  const byRatio = withRatio.length ? [...withRatio.map((row) => [x(row.threshold), ratio(row.sqnr)]), [width - right, ratio(withRatio.at(-1).sqnr)]] : [];
  const svg = draw("svg", { width, height, role: "img", "aria-label": "Size and SQNR by threshold; the table below has the numbers" },
    axisY(size, ticks(0, Math.max(report.bytes_before, ...sizes), 4), left, bytes, width - left - right),
    axisY(ratio, ticks(least - pad, most + pad, 4), left, (tick) => `${significant(tick)} dB`, width - left - right),
    axisX(x, powers(low, high), below + panel, powerText, 2 * panel + gap),
    draw("text", { class: "axis-title", x: left, y: top - 5 }, "weights and constants"),
    draw("text", { class: "axis-title", x: left, y: below - 7 }, "predicted SQNR"),
    draw("text", { class: "axis-title", x: width - right, y: height - 6, "text-anchor": "end" }, "threshold"),
    draw("path", { class: "area size", d: `${steps(bySize)}V${top + panel}H${left}Z` }),
    draw("path", { class: "curve size", d: steps(bySize) }),
    draw("path", { class: "curve sqnr", d: steps(byRatio) }));
  const place = chosen.threshold || rows.at(-1).threshold;
  svg.append(draw("line", { class: "threshold", x1: x(place), x2: x(place), y1: top, y2: below + panel }),
    draw("text", { class: "threshold-text", x: x(place) + 6, y: top + 12 }, "chosen"),
    draw("circle", { class: "chosen", cx: x(place), cy: size(chosen.bytes), r: 5.5 }));
  if (chosen.sqnr !== null) svg.append(draw("circle", { class: "chosen", cx: x(place), cy: ratio(chosen.sqnr), r: 5.5 }));
  const cross = draw("line", { class: "cross", y1: top, y2: below + panel, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    const here = event.clientX - svg.getBoundingClientRect().left;
    const row = rows.filter((one) => x(one.threshold) <= here).at(-1) || rows[0];
    cross.setAttribute("x1", x(row.threshold));
    cross.setAttribute("x2", x(row.threshold));
    cross.setAttribute("visibility", "visible");
    say(row);
  });
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    say(null);
  });
  return svg;
}

// The elements of a value by size, what integers cover of them shaded, and the least and greatest marked.
function histogram(value, width, isLogarithmic) {
  const { seen, covered } = value;
  const [left, right, top, bottom, height] = [10, 10, 8, 34, 150];
  const { start, width: step, counts } = seen.histogram;
  const ends = [start, start + step * counts.length, seen.low, seen.high, ...(covered ? [covered.low, covered.high] : [])];
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const x = linear(low, high, left, width - right);
  const most = Math.max(...counts, 1);
  const y = isLogarithmic ? logarithmic(0.5, most, height - bottom, top) : linear(0, most, height - bottom, top);
  const svg = draw("svg", { width, height, class: "histogram", role: "img", "aria-label": `Histogram of ${value.name}` });
  if (covered) {
    svg.append(draw("rect", { class: "covered", x: x(covered.low), y: top, width: Math.max(x(covered.high) - x(covered.low), 1), height: height - bottom - top }),
      draw("line", { class: "covered-end", x1: x(covered.low), x2: x(covered.low), y1: top, y2: height - bottom }),
      draw("line", { class: "covered-end", x1: x(covered.high), x2: x(covered.high), y1: top, y2: height - bottom }));
  }
  counts.forEach((amount, place) => {
    if (!amount) return;
    const from = x(start + place * step);
    const wide = Math.max(x(start + (place + 1) * step) - from - 0.5, 0.6);
    const column = draw("rect", { class: "column", x: from, y: y(amount), width: wide, height: Math.max(height - bottom - y(amount), 0.5) });
    const told = [`${significant(start + place * step)} to ${significant(start + (place + 1) * step)}`, plural(amount, "element")];
    column.addEventListener("pointermove", (event) => showTip(event, told));
    column.addEventListener("pointerleave", hideTip);
    svg.append(column);
  });
  for (const end of [seen.low, seen.high]) svg.append(draw("path", { class: "extreme", d: `M${x(end)},${height - bottom}l-4,7h8z` }));
  const marks = ticks(low, high, Math.max(4, Math.floor(width / 55)));
  svg.append(draw("line", { class: "ground", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    axisX(x, marks, height - bottom + 3, significant));
  return svg;
}

// A histogram of a few pixels for a row of a table.
function sparkline(value) {
  if (!value.seen || !value.seen.histogram.counts.length) return "";
  const { counts } = value.seen.histogram;
  const top = Math.log1p(Math.max(...counts));
  const columns = counts.map((amount, place) => (amount ? `M${place + 0.5},20V${(20 - (19 * Math.log1p(amount)) / top).toFixed(1)}` : ""));
  return draw("svg", { class: "spark", viewBox: `0 0 ${counts.length} 20`, width: 96, height: 20, preserveAspectRatio: "none", "aria-hidden": "true" },
    draw("path", { d: columns.join("") }));
}
