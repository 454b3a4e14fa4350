// The little that charts need of SVG: elements, scales, axes.

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** About `count` round numbers inside [low, high]. */
function ticks(low, high, count) {
  const raw = (high - low) / count || 1,
    power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const result = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step)
    result.push(Math.abs(value) < step * 1e-9 ? 0 : Number(value.toPrecision(12)));
  return result;
}

/** A linear map from [low, high] to pixels [from, to]. */
function scale(low, high, from, to) {
  const span = high - low || 1;
  const map = (value) => from + ((value - low) / span) * (to - from);
  map.invert = (pixel) => low + ((pixel - from) / (to - from)) * span;
  return map;
}

/** Smallest and largest finite number of some arrays, widened to hold `include`, with some air. */
function extent(arrays, include = []) {
  let low = Infinity,
    high = -Infinity;
  for (const array of [...arrays, include])
    for (const value of array)
      if (value !== null && Number.isFinite(value)) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
  if (low > high) return [0, 1];
  if (low === high) {
    low -= low === 0 ? 0 : 0.5;
    high += 0.5;
  }
  const air = (high - low) * 0.06;
  return [include.includes(low) ? low : low - air, include.includes(high) ? high : high + air];
}

/** Path through the points that exist; a gap where one is missing. */
function linePath(xs, ys) {
  let path = "",
    open = false;
  ys.forEach((y, index) => {
    const there = Number.isFinite(y);
    if (there) path += `${open ? "L" : "M"}${xs[index].toFixed(1)} ${y.toFixed(1)}`;
    open = there;
  });
  return path;
}

/** Horizontal grid lines with labels at the left. */
function yAxis(y, [low, high], left, right, count, form = shown) {
  return svg(
    "g",
    { class: "axis" },
    ...ticks(low, high, count).flatMap((tick) => [
      svg("line", { x1: left, x2: right, y1: y(tick), y2: y(tick), class: tick === 0 ? "zero" : "grid" }),
      svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, form(tick)),
    ]),
  );
}

/** Labels along the bottom, and what they count. */
function xAxis(x, marks, bottom, title, right) {
  return svg(
    "g",
    { class: "axis" },
    ...marks.map(([value, label]) => svg("text", { x: x(value), y: bottom + 15, "text-anchor": "middle" }, label)),
    svg("text", { x: right, y: bottom + 31, "text-anchor": "end", class: "axis-title" }, title),
  );
}
