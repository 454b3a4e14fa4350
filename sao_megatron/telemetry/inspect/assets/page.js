// The page: views, theme, keyboard. The address's #… is the id of the open trajectory, so that it can be linked to.

function showView(name) {
  for (const view of ["overview", "reader"]) {
    byId(view).hidden = view !== name;
    byId(`tab-${view}`).setAttribute("aria-selected", view === name);
  }
}

function toggleTheme() {
  const dark =
    document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = dark === "dark" ? "light" : "dark";
}

function describe(records) {
  const [run, other] = records.runs,
    first = records.trajectories.step[0],
    last = records.trajectories.step.at(-1),
    steps = first === last ? `step ${first}` : `steps ${first}–${last}`;
  byId("run-name").textContent = other ? `${run.name} beside ${other.name}` : run.name;
  byId("run-about").textContent =
    `${run.preset} on ${run.task} · ${steps} · ` +
    `${shown(records.count)} trajectories, ${shown(records.columns.token_id.length)} tokens recorded`;
}

function start(records) {
  describe(records);
  const reader = new Reader(records);
  const finder = new Finder(records, (index) => {
    reader.open(index);
    history.replaceState(null, "", `#${records.trajectories.trajectory[index]}`);
  });
  const read = () => {
    showView("reader");
    finder.draw();
    if (finder.current < 0) finder.move(0);
    else reader.curves.draw();
  };
  const recorded = records.trajectories.step;
  const pickStep = (step) => {
    finder.onlyStep(recorded.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best)));
    read();
    finder.select(finder.order[0]);
  };
  const step = (by) => {
    const opened = finder.current >= 0;
    read();
    if (opened) finder.move(by);
  };
  drawOverview(records, pickStep);

  const keys = {
    j: () => step(1),
    k: () => step(-1),
    ArrowRight: () => reader.move(1),
    ArrowLeft: () => reader.move(-1),
    n: () => reader.moveToNext(1),
    p: () => reader.moveToNext(-1),
    "/": () => {
      read();
      byId("f-text").focus();
    },
    "?": () => byId("help").showModal(),
    o: () => showView("overview"),
    t: read,
    d: toggleTheme,
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && event.target.closest("#filters")) return event.target.blur();
    const typing = event.target.closest("input, select, dialog[open]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    if (event.key.startsWith("Arrow") && byId("reader").hidden) return;
    event.preventDefault();
    keys[event.key]();
  });
  byId("tab-overview").addEventListener("click", () => showView("overview"));
  byId("tab-reader").addEventListener("click", read);
  byId("theme").addEventListener("click", toggleTheme);
  byId("help-button").addEventListener("click", () => byId("help").showModal());

  byId("loading").remove();
  const linked = records.trajectories.trajectory.indexOf(location.hash.slice(1));
  if (linked < 0) return showView("overview");
  showView("reader");
  finder.select(linked);
}

readRecords().then(start, (error) => {
  byId("loading").textContent = `The records cannot be read: ${error}`;
});
