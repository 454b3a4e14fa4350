// The overview: a few numbers, charts over the steps, charts by lag.

const STEP_CHARTS = [
  {
    title: "Reward",
    unit: "per trajectory",
    series: [
      ["reward/mean", "reward", "--first"],
      ["reward/solve_rate", "share solved", "--second"],
    ],
    include: [0, 1],
  },
  {
    title: "Dropped by the gate",
    unit: "% of action tokens",
    form: percent,
    include: [0],
    series: [
      ["mask/dropped_low", "low", "--low"],
      ["mask/dropped_high", "high", "--high"],
      ["mask/recovered", "recovered", "--recovered"],
    ],
  },
  {
    title: "Effective sample size",
    unit: "share of action tokens",
    include: [1],
    series: [["mask/effective_sample_size", "ESS", "--first"]],
  },
  {
    title: "Discarded mass m",
    unit: "share of the policy's probability",
    include: [0],
    series: [["mask/discarded_mass", "m", "--first"]],
  },
  {
    title: "Lag",
    unit: "weight versions",
    include: [0],
    series: [
      ["lag/mean", "mean", "--first"],
      ["lag/max", "largest", "--second"],
    ],
  },
  {
    title: "Entropy of the policy",
    unit: "nats a token",
    include: [0],
    series: [["policy/entropy", "entropy", "--first"]],
  },
  {
    title: "Critic",
    unit: "explained variance of the return",
    include: [0],
    series: [["critic/explained_variance", "explained variance", "--first"]],
  },
  { title: "Critic's loss", unit: "squared error", include: [0], series: [["critic/loss", "loss", "--first"]] },
  {
    title: "Gradient norm of the policy",
    unit: "before clipping",
    include: [0],
    series: [["policy/grad_norm", "norm", "--first"]],
  },
];

function drawOverview(records, pickStep) {
  const [run, other] = records.runs;
  byId("tiles").replaceChildren(...tiles(run, other));
  byId("step-charts").replaceChildren(
    ...STEP_CHARTS.map((chart) => stepChart(chart, records.runs, pickStep)).filter(Boolean),
  );
  byId("lag-charts").replaceChildren(...lagCharts(records));
}

function stepChart(chart, runs, pick) {
  const series = runs.flatMap((run, index) =>
    chart.series
      .filter(([metric]) => run.series[metric].some((value) => value !== null))
      .filter(([metric]) => metric !== "mask/recovered" || run.series[metric].some((value) => value > 0))
      .map(([metric, name, colour]) => ({
        name: runs.length > 1 ? `${name}, ${run.name}` : name,
        colour,
        mark: index ? "line thin" : colour === "--second" ? "line fine" : "line",
        x: run.steps,
        y: run.series[metric],
      })),
  );
  return series.length ? lineChart({ ...chart, series, pick }) : null;
}

function lagCharts({ runs, fates }) {
  if (!runs[0].lag.length)
    return [el("p", { class: "muted" }, "The policy was not updated in these steps, so no token has a fate.")];
  const run = runs[0],
    names = runs.flatMap((one) => one.lag.map((group) => group.name));
  const buckets = run.lag
    .map((group) => group.name)
    .concat(names)
    .filter((name, at, all) => all.indexOf(name) === at);
  const values = (one, field) => buckets.map((name) => one.lag.find((group) => group.name === name)?.[field] ?? null);
  const both = (field, name) =>
    runs.map((one, index) => ({
      name: runs.length > 1 ? `${name}, ${one.name}` : name,
      colour: index ? "--second" : "--first",
      mark: "block",
      y: values(one, field),
    }));
  const sides = runs.flatMap((one, index) =>
    ["low", "high"].map((side) => ({
      name: runs.length > 1 ? `${side}, ${one.name}` : side,
      colour: `--${side}`,
      mark: index ? "hatch" : "block",
      y: values(one, `dropped_${side}`),
    })),
  );
  const lag = { axis: "lag, versions", buckets };
  const middles = run.ratio_edges
    .slice(1)
    .map((edge, index) => shown(Number(((edge + run.ratio_edges[index]) / 2).toFixed(2))));
  return [
    barChart({
      ...lag,
      title: "Dropped by lag",
      unit: "% of action tokens",
      series: sides,
      form: percent,
      how: runs.length === 1 ? "stacked" : "beside",
      notes: runs.length === 1 ? values(run, "tokens").map((count) => `${shown(count)} tok`) : [],
    }),
    barChart({
      ...lag,
      title: "ESS by lag",
      unit: "share of action tokens",
      series: both("effective_sample_size", "ESS"),
      include: [0, 1],
    }),
    barChart({
      ...lag,
      title: "Discarded mass m by lag",
      unit: "share of probability",
      series: both("discarded_mass", "m"),
    }),
    barChart({
      title: "Ratio",
      unit: "√ of action tokens",
      axis: "log ratio (ends: and beyond)",
      buckets: middles,
      how: "layered",
      marks: [-3, -2, -1, 0, 1, 2, 3].map((edge) => [run.ratio_edges.indexOf(edge), shown(edge)]),
      form: (root) => shown(Math.round(root * root)),
      series: fates
        .map((fate, index) => ({
          name: fate.replace("_", " "),
          colour: `--${fate.replace("dropped_", "")}`,
          mark: "block",
          y: run.ratio_counts[index].map(Math.sqrt),
        }))
        .filter((one) => one.y.some(Boolean)),
    }),
    wordTable(run),
  ];
}

function tiles(run, other) {
  // Three digits, and none behind the fourth decimal place: smaller is nothing here.
  const brief = (value) => shown(value === null ? null : Number(Number(value.toPrecision(3)).toFixed(4)));
  const late = (one, metric) => {
    const values = one.series[metric].filter((value) => value !== null);
    const last = values.slice(-Math.max(1, Math.ceil(values.length / 10)));
    return last.length ? last.reduce((sum, value) => sum + value, 0) / last.length : null;
  };
  const dropped = (one) => late(one, "mask/dropped_low") + late(one, "mask/dropped_high");
  const all = [
    ["reward", (one) => brief(late(one, "reward/mean"))],
    ["dropped", (one) => percent(Number(dropped(one).toFixed(4)))],
    ["effective sample size", (one) => brief(late(one, "mask/effective_sample_size"))],
    ["discarded mass m", (one) => brief(late(one, "mask/discarded_mass"))],
    ["lag, versions", (one) => brief(late(one, "lag/mean"))],
    ["entropy, nats", (one) => brief(late(one, "policy/entropy"))],
  ];
  return all.map(([name, value]) =>
    el(
      "div",
      { class: "tile" },
      el("span", {}, name),
      el("strong", {}, value(run)),
      el("small", {}, other ? `${other.name}: ${value(other)}` : "last tenth of the steps"),
    ),
  );
}

function wordTable(run) {
  const head = ["token", "dropped", "of", "low", "high"].map((name) => el("th", { scope: "col" }, name));
  const rows = run.words.map((word) =>
    el(
      "tr",
      {},
      el("td", {}, el("code", {}, visible(word.text) || `#${word.id}`)),
      ...[word.low + word.high, word.tokens, word.low, word.high].map((count) => el("td", {}, shown(count))),
    ),
  );
  return el(
    "figure",
    {},
    el(
      "figcaption",
      {},
      el("strong", {}, "Most dropped tokens"),
      el("span", { class: "unit" }, "of the recorded sample"),
    ),
    rows.length
      ? el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows))
      : el("p", { class: "muted" }, "Nothing was dropped."),
  );
}
