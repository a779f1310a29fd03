// Keeps the page of `train serve` up to date: the table of all runs, and below it the report of the chosen ones.
"use strict";
const EVERY_MS = 2000, PATIENCE_MS = 30000;
const FIRST_RUNS = 10;  // Number of newest runs that are shown at first.
let overview = null, selected = new Set(), known = new Set(), shownVersion = null, asking = false, filtered = null;

const words = () => new URLSearchParams(location.hash.slice(1));
const openedName = () => words().get("run");
const numberOf = (name) => Object.keys(overview.runs).find((number) => overview.runs[number] === name);

// The numbers of the runs that are shown: the opened one, or the chosen ones that the filter finds.
function shownRuns() {
  const opened = openedName() !== null ? numberOf(openedName()) : undefined;
  if (openedName() !== null) return opened === undefined ? [] : [Number(opened)];
  return overview.table.runs.filter((run) => selected.has(run) && (filtered === null || filtered.has(run)));
}

let answered = new Date();  // Time of the last answer.

async function ask(path, parameters = {}) {
  const query = new URLSearchParams(parameters), stopper = new AbortController();
  // Without a limit a server that hangs, or a tunnel that is gone, would leave an old page that looks live.
  const timer = setTimeout(() => stopper.abort(), PATIENCE_MS);
  let answer, text;
  try {
    answer = await fetch(`${path}?${query}`, { signal: stopper.signal });
    text = await answer.text();
  } catch {
    throw new Error(`The server does not answer: was train serve ended? This page is as of ${answered.toLocaleTimeString()}.`);
  } finally {
    clearTimeout(timer);
  }
  answered = new Date();
  if (!answer.ok) throw new Error(`${answer.status}: ${text}`);
  return JSON.parse(text);
}

live.isShown = (run) => shownRuns().includes(run);
live.isChosen = (run) => selected.has(run);
live.choose = (run, isChosen) => {
  selected[isChosen ? "add" : "delete"](run);
  refresh();
};
live.open = (run) => `#${new URLSearchParams([["run", overview.runs[run]]])}`;
live.filter = (runs) => {
  const before = String(shownRuns());
  filtered = new Set(runs);
  if (String(shownRuns()) !== before) refresh();
};
live.curves = async (block) => {
  if (!block.fetched && block.curves.every((curve) => curve.y)) return true;  // Those of train validate come with the page.
  // Kept: the runs of an answer may have no such curve any more.
  const names = block.names ||= [...new Set(block.curves.map((curve) => curve.name))];
  const axis = block.axis || state.x, wanted = JSON.stringify([live.version, axis]);
  if (block.fetched === wanted) return true;
  const parameters = [["runs", live.runs], ["x", axis], ...names.map((name) => ["name", name])];
  try {
    block.curves = await ask("/api/curves", parameters);
    block.fetched = wanted;
    return true;
  } catch (error) {
    byId("problem").textContent = String(error.message);
    return false;
  }
};

// Ask for what is new; again if something was chosen meanwhile.
let again = false;
async function refresh() {
  if (asking) { again = true; return; }
  asking = true;
  try {
    overview = await ask("/api/runs", { runs: [...selected] });
    byId("problem").textContent = "";
    // The table shows in what the chosen runs differ.
    if (selectNew()) overview = await ask("/api/runs", { runs: [...selected] });
    const runs = shownRuns(), opened = openedName();
    const version = JSON.stringify([runs, runs.map((run) => overview.versions[run]), opened]);
    const page = version === shownVersion ? null : runs.length ? await ask("/api/page", { runs }) : { runs: {}, looks: {}, sections: [] };
    if (page) {
      live.page = page;
      live.runs = runs;
      live.version = version;
    }
    shownVersion = version;
    show(opened);
  } catch (error) {
    byId("problem").textContent = error.message;
  } finally {
    asking = false;
  }
  if (again) { again = false; refresh(); }
}

// Show a run that is new to the page as long as few are shown. Returns whether the choice has changed.
function selectNew() {
  const { runs } = overview.table, before = String([...selected]);
  selected = new Set(runs.filter((run) => selected.has(run)));
  for (const run of runs) if (!known.has(run) && selected.size < FIRST_RUNS) selected.add(run);
  known = new Set(runs);
  return String([...selected]) !== before;
}

function show(opened) {
  const { page } = live, count = overview.table.runs.length;
  const table = { ...overview.table, title: "" };
  const missing = opened !== null && numberOf(opened) === undefined;
  render({
    ...page,
    title: opened ?? overview.title,
    made: missing ? "There is no such run any more." : opened !== null ? "" : count ? `${count} run${count === 1 ? "" : "s"}, ${shownRuns().length} shown`
      : "No runs are here yet. Each appears by itself once it has begun.",
    sections: [...(opened === null && count ? [{ title: "Runs", blocks: [table] }] : []), ...page.sections],
  });
  for (const box of document.querySelectorAll(".choice input")) box.checked = selected.has(Number(box.dataset.run));
  byId("back").hidden = opened === null;
  byId("chosen").hidden = opened !== null || !count;
}

// The token is in a cookie now: the address may be shown to others.
if (location.search) history.replaceState(null, "", location.pathname + location.hash);
for (const [text, choose] of [["show all", () => overview.table.runs], ["none", () => []]]) {
  element("button", text, byId("chosen")).addEventListener("click", () => { selected = new Set(choose()); refresh(); });
}
addEventListener("hashchange", () => { shownVersion = null; scrollTo(0, 0); refresh(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
// No requests while the page is hidden.
setInterval(() => { if (!document.hidden) refresh(); }, EVERY_MS);
refresh();
