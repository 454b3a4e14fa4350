// One trajectory as its conversation, every token coloured by its fate and shaded by its ratio.

const SHADED_AT = 1.5; // |log r| of the deepest shade
const CHUNK = 400; // tokens of a piece that the browser may leave unpainted while it is out of sight

/** White space made visible. */
function visible(text) {
  return text
    .replaceAll("\n", "⏎")
    .replaceAll("\t", "⇥")
    .replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}

class Reader {
  constructor(records) {
    this.records = records;
    this.first = this.end = 0;
    this.token = -1;
    const turns = byId("turns");
    turns.addEventListener("pointerover", (event) => this.#hover(event));
    turns.addEventListener("pointerleave", () => this.#show(this.token));
    turns.addEventListener("click", (event) => {
      const at = tokenOf(event);
      if (at !== null) this.select(at);
    });
    turns.addEventListener("focusin", (event) => {
      const at = tokenOf(event);
      if (at !== null) this.#mark(at);
    });
    this.curves = new Curves(records, (token) => this.select(token));
    byId("legend").replaceChildren(...legend(records));
    window.addEventListener("resize", () => this.curves.draw());
  }

  open(index) {
    [this.first, this.end] = this.records.range(index);
    byId("about").replaceChildren(...this.#about(index));
    byId("turns").replaceChildren(...this.#segments());
    byId("conversation").scrollTop = 0;
    this.curves.open(this.first, this.end);
    let start = this.first;
    while (start < this.end && this.records.kind(start) !== "action") start++;
    this.#mark(start);
  }

  /** Focus a token: the numbers and the curves' cursor follow. */
  select(token) {
    const span = byId(`token-${token}`);
    if (!span) return;
    this.#mark(token);
    span.focus({ preventScroll: true });
    span.scrollIntoView({ block: "nearest" });
  }

  move(by) {
    this.select(Math.max(this.first, Math.min(this.end - 1, this.token + by)));
  }

  /** The next (by = 1) or previous (−1) token whose fate is not `kept`. */
  moveToNext(by) {
    for (let token = this.token + by; token >= this.first && token < this.end; token += by)
      if (this.records.columns.fate[token] > 0) return this.select(token);
  }

  #mark(token) {
    const old = document.querySelector(".token.current"),
      span = byId(`token-${token}`);
    if (old) {
      old.classList.remove("current");
      old.tabIndex = -1;
    }
    span.classList.add("current");
    span.tabIndex = 0;
    this.token = token;
    this.#show(token);
  }

  #hover(event) {
    const at = tokenOf(event);
    if (at !== null) this.#show(at);
  }

  #show(token) {
    byId("numbers").replaceChildren(...numbersOf(this.records, token, token - this.first));
    this.curves.point(token);
  }

  #about(index) {
    const t = this.records.trajectories;
    const versions = this.records.columns.version.subarray(this.first, this.end).filter((version) => version >= 0);
    const [oldest, newest] = [versions.reduce((a, b) => Math.min(a, b)), versions.reduce((a, b) => Math.max(a, b))];
    const facts = [
      ["step", t.step[index]],
      ["reward", shown(t.reward[index])],
      ["status", t.status[index]],
      ["dropped", `${percent(t.dropped[index])} of ${shown(t.actions[index])} actions`],
      ["lag", lagOf(t, index)],
      ["versions", oldest === newest ? oldest : `${oldest}–${newest}`],
      ["chosen as", t.chosen[index]],
      ["id", t.trajectory[index].slice(0, 12)],
    ];
    return [
      el("h2", {}, t.prompt[index], el("small", {}, t.task[index])),
      el(
        "dl",
        { class: "facts" },
        ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
      ),
    ];
  }

  #segments() {
    const { kind, turn } = this.records.columns,
      result = [];
    let version = -1;
    for (let start = this.first; start < this.end;) {
      let end = start + 1;
      while (end < this.end && kind[end] === kind[start] && (kind[start] === 0 || turn[end] === turn[start])) end++;
      const name = this.records.kind(start),
        pieces = [];
      for (let piece = start; piece < end; piece += CHUNK) {
        const body = el("span", { class: "piece" });
        for (let token = piece; token < Math.min(end, piece + CHUNK); token++) {
          const own = this.records.columns.version[token];
          if (own >= 0 && own !== version) {
            body.append(seam(version, own));
            version = own;
          }
          body.append(this.#token(token));
        }
        pieces.push(body);
      }
      const label = { prompt: "prompt", action: `model · turn ${turn[start] + 1}`, observation: "environment" }[name];
      result.push(
        el("section", { class: `segment ${name}` }, el("h3", {}, label), el("div", { class: "text" }, ...pieces)),
      );
      start = end;
    }
    return result;
  }

  #token(token) {
    const { records } = this,
      fate = records.fate(token),
      word = records.word(token);
    const depth = Math.min(1, Math.abs(records.columns.log_ratio[token] || 0) / SHADED_AT);
    const span = el(
      "span",
      {
        class: `token ${fate}`,
        id: `token-${token}`,
        tabindex: -1,
        style: fate ? `--depth: ${depth.toFixed(2)}` : undefined,
      },
      word.replaceAll("\n", "⏎\n"),
    );
    span.dataset.token = token;
    return span;
  }
}

/** Where the weights that sample change. */
function seam(from, to) {
  return el("span", {
    class: from < 0 ? "seam first" : "seam",
    title: from < 0 ? `sampled by version ${to}` : `version ${from} until here, version ${to} from here`,
    "data-version": `v${to}`,
  });
}

function tokenOf(event) {
  const span = event.target.closest(".token");
  return span ? Number(span.dataset.token) : null;
}

function legend({ fates, columns }) {
  const meaning = {
    kept: "kept",
    dropped_low: "dropped low",
    dropped_high: "dropped high",
    recovered: "recovered at the band's edge",
  };
  const there = new Set(columns.fate);
  const sample = (fate) =>
    el("span", {}, el("span", { class: `token ${fate}`, style: "--depth: 0.5" }, "token"), meaning[fate]);
  return [
    ...fates.filter((_, index) => index < 3 || there.has(index)).map(sample),
    el("span", {}, el("span", { class: "ramp", "aria-hidden": "true" }), "|log ratio| 0 to 1.5"),
    el("span", {}, el("span", { class: "seam", "data-version": "v2" }), "new weights from here"),
  ];
}

function numbersOf(records, token, position) {
  const c = records.columns,
    number = (name) => shown(c[name][token]);
  const logprob = (name) =>
    Number.isNaN(c[name][token])
      ? "–"
      : `${number(name)} (${percent(Number(Math.exp(c[name][token]).toPrecision(2)))})`;
  const whole = (name) => (c[name][token] < 0 ? "–" : String(c[name][token]));
  const fate = records.fate(token);
  const groups = [
    [
      ["token id", c.token_id[token]],
      ["position", position],
      ["turn", c.turn[token] + 1],
      ["kind", records.kind(token)],
    ],
    [
      ["version", whole("version")],
      ["lag", whole("lag")],
    ],
    [
      ["fate", fate ? fate.replace("_", " ") : "–"],
      ["ratio r", number("ratio")],
      ["log ratio", number("log_ratio")],
      ["weight", number("weight")],
    ],
    [
      ["log p policy", logprob("policy_logprob")],
      ["log p rollout", logprob("rollout_logprob")],
      ["entropy, nats", number("entropy")],
      ["expert load", number("expert_load")],
    ],
    [
      ["advantage", number("advantage")],
      ["value", number("value")],
      ["return", number("return")],
      ["reward", number("reward")],
    ],
  ];
  return [
    el("h3", {}, el("code", { class: `token ${fate}`, style: "--depth: 0.4" }, visible(records.word(token)))),
    ...groups.map((rows) =>
      el(
        "dl",
        {},
        ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { "data-name": name }, String(value))]),
      ),
    ),
  ];
}
