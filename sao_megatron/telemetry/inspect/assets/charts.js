// Charts of the overview: lines over steps, bars by bucket. Each is a figure with a title, a legend and axes.

const WIDTH = 440,
  HEIGHT = 204,
  LEFT = 52,
  RIGHT = 428,
  TOP = 12,
  BOTTOM = 168;

function figure(title, unit, series, picture) {
  const key = (one) => el("span", { class: `key ${one.mark}`, style: `--colour: var(${one.colour})` }, one.name);
  return el(
    "figure",
    {},
    el("figcaption", {}, el("strong", {}, title), el("span", { class: "unit" }, unit)),
    el("div", { class: "keys" }, ...series.map(key)),
    picture,
  );
}

/** series: [{name, colour: css variable, mark: line, with fine or thin, x, y}]; `pick(step)` answers a click. */
function lineChart({ title, unit, series, include = [], form = shown, pick }) {
  const xs = series.flatMap((one) => [one.x[0], one.x.at(-1)]),
    ys = extent(
      series.map((one) => one.y),
      include,
    );
  const x = scale(Math.min(...xs), Math.max(...xs), LEFT, RIGHT),
    y = scale(...ys, BOTTOM, TOP);
  const marks = ticks(Math.min(...xs), Math.max(...xs), 6)
    .filter(Number.isInteger)
    .map((tick) => [tick, shown(tick)]);
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: BOTTOM, visibility: "hidden" });
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, ${unit}` },
    yAxis(y, ys, LEFT, RIGHT, 4, form),
    xAxis(x, marks, BOTTOM, "learner step", RIGHT),
    ...series.map((one) =>
      svg("path", {
        class: one.mark,
        style: `stroke: var(${one.colour})`,
        d: linePath(
          one.x.map(x),
          one.y.map((value) => (value === null ? NaN : y(value))),
        ),
      }),
    ),
    cursor,
  );
  const readout = el("p", { class: "readout" }, "\u00a0");
  const step = (event) => {
    const box = picture.getBoundingClientRect();
    return Math.round(x.invert(((event.clientX - box.left) / box.width) * WIDTH));
  };
  picture.addEventListener("pointermove", (event) => {
    const at = Math.max(Math.min(...xs), Math.min(Math.max(...xs), step(event)));
    cursor.setAttribute("x1", x(at));
    cursor.setAttribute("x2", x(at));
    cursor.setAttribute("visibility", "visible");
    readout.textContent =
      `step ${at}: ` +
      series
        .map((one) => {
          const value = one.y[one.x.indexOf(at)];
          return `${one.name} ${value === undefined || value === null ? "–" : form(value)}`;
        })
        .join(", ");
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "\u00a0";
  });
  picture.addEventListener("click", (event) => pick?.(step(event)));
  const result = figure(title, unit, series, picture);
  result.append(readout);
  return result;
}

/** Bars by bucket. series: [{name, colour, mark: block | hatch, y}]; `how`: stacked, layered (largest first) or beside
 * each other. `notes`: text above the bars; `marks`: [place in buckets, text] along the axis instead of all names. */
function barChart({
  title,
  unit,
  axis,
  buckets,
  series,
  how = "beside",
  notes = [],
  form = shown,
  include = [0],
  marks,
}) {
  const stacked = how === "stacked";
  const sums = buckets.map((_, index) => series.reduce((sum, one) => sum + Math.max(one.y[index] ?? 0, 0), 0));
  const ys = extent(stacked ? [sums] : series.map((one) => one.y), include);
  const y = scale(...ys, BOTTOM, TOP + (notes.length ? 10 : 0)),
    x = scale(0, buckets.length, LEFT, RIGHT);
  const room = x(1) - x(0),
    beside = how === "beside" ? series.length : 1;
  const gap = buckets.length > 20 ? 0.5 : room * 0.18,
    width = (room - 2 * gap) / beside;
  const bars = buckets.flatMap((_, index) => {
    let base = 0;
    return series.map((one, which) => {
      const value = one.y[index] ?? 0,
        from = stacked ? base : 0;
      base += value;
      const [top, bottom] = [y(Math.max(from, from + value)), y(Math.min(from, from + value))];
      return svg(
        "rect",
        {
          x: x(index) + gap + (beside > 1 ? which * width : 0),
          y: top,
          width,
          height: bottom - top,
          class: `bar ${one.mark}`,
          style: `fill: var(${one.colour})`,
        },
        svg("title", {}, `${axis} ${buckets[index]}: ${one.name} ${form(value)}`),
      );
    });
  });
  const above = notes.map((note, index) =>
    svg(
      "text",
      {
        x: x(index + 0.5),
        "text-anchor": "middle",
        class: "note",
        y: Math.min(...series.map((one) => y(stacked ? sums[index] : Math.max(one.y[index] ?? 0, 0)))) - 4,
      },
      note,
    ),
  );
  marks ??= buckets.map((name, index) => [index + 0.5, name]);
  return figure(
    title,
    unit,
    series,
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, ${unit}` },
      yAxis(y, ys, LEFT, RIGHT, 4, form),
      ...bars,
      svg("g", { class: "axis" }, ...above),
      xAxis(x, marks, BOTTOM, axis, RIGHT),
    ),
  );
}
