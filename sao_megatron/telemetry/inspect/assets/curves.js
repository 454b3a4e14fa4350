// Beneath the conversation: value and return, advantage, and log ratio along the action tokens of a trajectory.

const PANEL = 92,
  SPACE = 34,
  MARGIN = 56;
const SHAPES = [
  // of the fates, so that colour alone never tells them apart
  (x, y) => `M${x - 2} ${y}a2 2 0 1 0 4 0a2 2 0 1 0 -4 0`,
  (x, y) => `M${x - 4.5} ${y - 3}h9l-4.5 7z`,
  (x, y) => `M${x - 4.5} ${y + 3}h9l-4.5 -7z`,
  (x, y) => `M${x} ${y - 4.5}l4.5 4.5l-4.5 4.5l-4.5 -4.5z`,
];
const FATE_COLOURS = ["--kept", "--low", "--high", "--recovered"];

class Curves {
  constructor(records, select) {
    this.records = records;
    this.select = select;
    this.actions = [];
    this.token = -1;
  }

  open(first, end) {
    this.actions = [];
    for (let token = first; token < end; token++) if (this.records.kind(token) === "action") this.actions.push(token);
    this.draw();
  }

  draw() {
    const box = byId("curves"),
      width = Math.max(320, box.clientWidth),
      right = width - 12,
      panels = this.#panels();
    if (!this.actions.length || !box.clientWidth) return;
    this.x = scale(0, Math.max(1, this.actions.length - 1), MARGIN, right);
    const height = panels.length * (PANEL + SPACE) + 18;
    this.cursor = svg("line", { class: "cursor", y1: 16, y2: height - 34, visibility: "hidden" });
    const picture = svg(
      "svg",
      { width, height, role: "img", "aria-label": "Values, advantages and ratios by action token" },
      ...this.#turnMarks(height),
      ...panels.map((panel, index) => this.#panel(panel, index * (PANEL + SPACE) + 18, right)),
      xAxis(this.x, this.#marks(), height - 34, "action token", right),
      this.cursor,
    );
    picture.addEventListener("click", (event) => {
      const place = Math.round(this.x.invert(event.clientX - picture.getBoundingClientRect().left));
      this.select(this.actions[Math.max(0, Math.min(this.actions.length - 1, place))]);
    });
    box.replaceChildren(picture);
    this.point(this.token);
  }

  /** Put the cursor on a token. */
  point(token) {
    this.token = token;
    const place = this.actions.indexOf(token);
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", place < 0 ? "hidden" : "visible");
    if (place >= 0) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.x(place));
  }

  #marks() {
    return ticks(0, Math.max(1, this.actions.length - 1), 8)
      .filter(Number.isInteger)
      .map((tick) => [tick, shown(tick)]);
  }

  #values(name) {
    return this.actions.map((token) => this.records.columns[name][token]);
  }

  #panels() {
    const all = [
      { title: "value", more: "┄ return, in units of reward", lines: ["value", "return"], include: [0] },
      { title: "advantage", more: "in units of reward", bars: "advantage", include: [0] },
      { title: "log ratio", more: "nats", dots: "log_ratio", include: [0] },
    ];
    return all.filter(({ lines, bars, dots }) => this.#values(lines?.[0] ?? bars ?? dots).some(Number.isFinite));
  }

  #panel({ title, more, lines = [], bars, dots, include }, top, right) {
    const names = [...lines, bars, dots].filter(Boolean),
      bounds = extent(
        names.map((name) => this.#values(name)),
        include,
      );
    const y = scale(...bounds, top + PANEL, top),
      x = this.x;
    const label = svg("text", { x: MARGIN, y: top - 6, class: "panel-title" }, title);
    label.append(svg("tspan", { class: "muted", dx: 8 }, more));
    const parts = [yAxis(y, bounds, MARGIN, right, 3), label];
    lines.forEach((name, index) =>
      parts.push(
        svg("path", {
          class: index ? "line dashed" : "line",
          style: `stroke: var(${index ? "--muted" : "--first"})`,
          d: linePath(
            this.actions.map((_, at) => x(at)),
            this.#values(name).map(y),
          ),
        }),
      ),
    );
    if (bars)
      parts.push(
        svg("path", {
          class: "stems",
          d: this.#values(bars)
            .map((value, at) =>
              Number.isFinite(value) ? `M${x(at).toFixed(1)} ${y(0).toFixed(1)}V${y(value).toFixed(1)}` : "",
            )
            .join(""),
        }),
      );
    if (dots) parts.push(...this.#dots(this.#values(dots), x, y));
    return svg("g", {}, ...parts);
  }

  #dots(values, x, y) {
    return SHAPES.map((shape, fate) =>
      svg("path", {
        style: `fill: var(${FATE_COLOURS[fate]})`,
        d: values
          .map((value, at) =>
            this.records.columns.fate[this.actions[at]] === fate && Number.isFinite(value)
              ? shape(x(at), y(value))
              : "",
          )
          .join(""),
      }),
    );
  }

  /** Where turns begin. */
  #turnMarks(height) {
    const { turn } = this.records.columns;
    return this.actions.flatMap((token, at) =>
      at && turn[token] !== turn[this.actions[at - 1]]
        ? [svg("line", { class: "turn", x1: this.x(at - 0.5), x2: this.x(at - 0.5), y1: 16, y2: height - 34 })]
        : [],
    );
  }
}
