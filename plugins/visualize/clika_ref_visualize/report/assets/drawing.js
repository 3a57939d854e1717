// Plots: scales, axes, a tooltip at the pointer, and plots that are drawn again after a resize.

function linear(low, high, from, to) {
  const span = high - low || 1;
  return (x) => from + ((x - low) / span) * (to - from);
}

function logarithmic(low, high, from, to) {
  const scale = linear(Math.log10(low), Math.log10(high), from, to);
  return (x) => scale(Math.log10(Math.max(x, low)));
}

function niceStep(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= rough) || rough;
}

function ticks(low, high, count = 5) {
  const step = niceStep(high - low || 1, count);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return found;
}

function powers(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.log10(high) + 1e-9; power += 1) found.push(10 ** power);
  const every = Math.ceil(found.length / 8);
  return found.filter((_, index) => index % every === 0);
}

function powerText(x) {
  const power = Math.round(Math.log10(x));
  return power >= -3 && power <= 3 ? String(Number(x.toPrecision(1))) : `1e${power}`;
}

// Calls `paint(width)` now and after each change of the host's width, and shows the SVG that it returns.
function drawOnResize(host, paint) {
  let shown = 0;
  const repaint = () => {
    const width = Math.floor(host.clientWidth);
    if (width < 50 || width === shown) return;
    shown = width;
    host.replaceChildren(paint(width));
  };
  new ResizeObserver(repaint).observe(host);
  repaint();
}

function axisX(scale, marks, y, text, height = 0) {
  return createSvg(
    "g",
    { class: "axis" },
    marks.map((mark) => [
      createSvg("line", { x1: scale(mark), x2: scale(mark), y1: y - height, y2: y + 4 }),
      createSvg("text", { x: scale(mark), y: y + 17, "text-anchor": "middle" }, text(mark)),
    ]),
  );
}

function axisY(scale, marks, x, text, width) {
  return createSvg(
    "g",
    { class: "axis" },
    marks.map((mark) => [
      createSvg("line", { x1: x, x2: x + width, y1: scale(mark), y2: scale(mark) }),
      createSvg("text", { x: x - 7, y: scale(mark) + 4, "text-anchor": "end" }, text(mark)),
    ]),
  );
}

const tip = getById("tip");

function showTip(event, lines) {
  tip.replaceChildren(...lines.map((line, index) => createElement(index ? "div" : "b", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const y = event.clientY + 16 + box.height > window.innerHeight ? event.clientY - box.height - 10 : event.clientY + 16;
  tip.style.transform = `translate(${Math.max(x, 4)}px, ${Math.max(y, 4)}px)`;
}

function hideTip() {
  tip.hidden = true;
}

// A step line through points: [[x, y], ...].
function steps(points) {
  return points.map(([x, y], index) => (index ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `M${x.toFixed(1)},${y.toFixed(1)}`)).join("");
}
