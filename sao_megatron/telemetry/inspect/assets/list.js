// Filters, sorting, and the list of trajectories, of which only the rows in sight exist.

const ROW = 58;
const RANGES = ["step", "reward", "dropped", "lag"];

class Finder {
  /** `open(index)` is called when a trajectory is chosen. */
  constructor(records, open) {
    this.records = records;
    this.open = open;
    this.order = [];
    this.current = -1;
    this.ascending = true;
    for (const field of document.querySelectorAll("[data-range]")) this.#makeRange(field);
    const tasks = [...new Set(records.trajectories.task)].sort();
    byId("f-task").append(
      el("option", { value: "" }, "all"),
      ...tasks.map((task) => el("option", { value: task }, task)),
    );
    byId("filters").addEventListener("input", () => this.apply());
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("f-order").addEventListener("click", () => {
      this.ascending = !this.ascending;
      this.apply();
    });
    byId("f-reset").addEventListener("click", () => {
      this.reset();
      this.apply();
    });
    byId("list").addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(byId("list"));
    this.apply();
  }

  #makeRange(field) {
    const name = field.dataset.range,
      unit = field.dataset.unit;
    const input = (end) =>
      el("input", {
        id: `f-${name}-${end}`,
        type: "number",
        step: "any",
        placeholder: end,
        "aria-label": `${unit}, ${end}`,
      });
    field.append(el("label", { for: `f-${name}-min` }, unit), input("min"), input("max"));
  }

  reset() {
    byId("filters").reset();
    this.ascending = true;
  }

  /** Show only the trajectories of one step. */
  onlyStep(step) {
    this.reset();
    byId("f-step-min").value = byId("f-step-max").value = step;
    this.apply();
  }

  apply() {
    const t = this.records.trajectories,
      bounds = Object.fromEntries(RANGES.map((name) => [name, this.#bounds(name)]));
    const text = byId("f-text").value.trim().toLowerCase(),
      task = byId("f-task").value,
      chosen = byId("f-chosen").value;
    const inside = (name, low, high = low) => high >= bounds[name][0] && low <= bounds[name][1];
    this.order = [];
    for (let index = 0; index < this.records.count; index++)
      if (
        (!task || t.task[index] === task) &&
        (!chosen || t.chosen[index] === chosen) &&
        inside("step", t.step[index]) &&
        inside("reward", t.reward[index]) &&
        inside("dropped", 100 * t.dropped[index]) &&
        inside("lag", t.lag_min[index], t.lag_max[index]) &&
        (!text || this.records.text(index).includes(text))
      )
        this.order.push(index);
    const key = t[byId("f-sort").value],
      sign = this.ascending ? 1 : -1;
    this.order.sort((a, b) => sign * (key[a] - key[b]) || a - b);
    byId("f-order").textContent = this.ascending ? "↑" : "↓";
    byId("count").textContent = `${shown(this.order.length)} of ${shown(this.records.count)} trajectories`;
    byId("rows").style.height = `${this.order.length * ROW}px`;
    this.draw();
  }

  #bounds(name) {
    const value = (end, none) => {
      const field = byId(`f-${name}-${end}`);
      return field.value === "" ? none : Number(field.value);
    };
    return [value("min", -Infinity), value("max", Infinity)];
  }

  /** Go `by` rows on from the current trajectory (to the first one if it is not listed). */
  move(by) {
    if (!this.order.length) return;
    const at = this.order.indexOf(this.current);
    this.select(this.order[at < 0 ? 0 : Math.max(0, Math.min(this.order.length - 1, at + by))]);
  }

  select(index) {
    this.current = index;
    this.#reveal();
    this.draw();
    this.open(index);
  }

  #reveal() {
    const list = byId("list"),
      at = this.order.indexOf(this.current) * ROW;
    if (at < 0) return;
    if (at < list.scrollTop) list.scrollTop = at;
    if (at + ROW > list.scrollTop + list.clientHeight) list.scrollTop = at + ROW - list.clientHeight;
  }

  draw() {
    const list = byId("list"),
      first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
    const end = Math.min(this.order.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 5);
    const rows = [];
    for (let place = first; place < end; place++) rows.push(this.#row(place));
    byId("rows").replaceChildren(...rows);
    const there = this.order.slice(first, end).includes(this.current);
    if (there) list.setAttribute("aria-activedescendant", `row-${this.current}`);
    else list.removeAttribute("aria-activedescendant");
  }

  #row(place) {
    const index = this.order[place],
      t = this.records.trajectories;
    const part = (name) => el("i", { class: name, style: `width: ${(100 * t[name][index]) / t.actions[index]}%` });
    return el(
      "div",
      {
        class: "row",
        role: "option",
        id: `row-${index}`,
        style: `top: ${place * ROW}px`,
        "aria-selected": index === this.current,
        "aria-posinset": place + 1,
        "aria-setsize": this.order.length,
        onclick: () => this.select(index),
      },
      el("span", { class: "prompt" }, t.prompt[index]),
      el("span", { class: "reward" }, `reward ${shown(t.reward[index])}`),
      el(
        "span",
        { class: "muted" },
        `step ${t.step[index]} · ${shown(t.actions[index])} actions · lag ${lagOf(t, index)}`,
      ),
      el("span", { class: "muted share" }, t.dropped[index] ? `${percent(t.dropped[index])} dropped` : ""),
      el("span", { class: "strip", "aria-hidden": "true" }, part("low"), part("high"), part("recovered")),
    );
  }
}

function lagOf(t, index) {
  const [low, high] = [t.lag_min[index], t.lag_max[index]];
  return low === high ? String(low) : `${low}–${high}`;
}
