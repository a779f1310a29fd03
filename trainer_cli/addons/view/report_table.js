// Tables that sort by a click on a column, filter their rows, and choose runs.

const CLOCK = /^(\d+):(\d\d)(?::(\d\d))?\b/;
function valueOf(text) {
  const clock = CLOCK.exec(text);
  if (clock) return clock[3] === undefined ? clock[1] * 60 + +clock[2] : clock[1] * 3600 + clock[2] * 60 + +clock[3];
  const plain = text.replace(/,/g, ""), value = parseFloat(plain);
  return /^[-+]?(\d|\.\d|nan|inf)/i.test(plain) && !Number.isNaN(value) ? value : null;
}

// What is missing or not finite is last in both directions.
const isLast = (text) => text === "" || /^[-+]?(nan|inf|infinity)$/i.test(text);

function compareTexts(a, b) {
  if (isLast(a) || isLast(b)) return isLast(a) - isLast(b);
  const [first, second] = [valueOf(a), valueOf(b)];
  return first !== null && second !== null && first !== second ? first - second : a.localeCompare(b, "en", { numeric: true });
}

// What a filter finds: a regular expression, or while it is none, the text itself.
function finder(text) {
  try {
    const pattern = new RegExp(text, "i");
    return (content) => pattern.test(content);
  } catch {
    return (content) => content.toLowerCase().includes(text.toLowerCase());
  }
}

function addTable(key, block, parent) {
  const memory = remembered.get(key) || { sort: null, down: false, find: "", open: !block.fold };
  remembered.set(key, memory);
  if (block.fold) {
    parent = element("details", null, parent);
    parent.open = memory.open;
    parent.addEventListener("toggle", (event) => { memory.open = event.target.open; });
    element("summary", `${block.title || "Table"} (${block.rows.length})`, parent);
  } else if (block.title) element("h3", block.title, parent);
  const tools = element("div", null, parent, "tools");
  const find = block.filter && (block.rows.length > 12 || memory.find || live.filter) ? element("input", null, tools) : null;
  const box = makeScrollable(element("div", null, parent, "box"), block.title || key.split("/")[0]);
  const table = element("table", null, box, block.choose ? "runs" : "");
  box.addEventListener("scroll", () => { memory.scroll = [box.scrollTop, box.scrollLeft]; });
  requestAnimationFrame(() => { [box.scrollTop, box.scrollLeft] = memory.scroll || [0, 0]; });
  const head = element("tr", null, element("thead", null, table)), body = element("tbody", null, table);
  const rows = block.rows.map((cells, index) => {
    const row = element("tr", null, null, (block.marked || []).includes(index) ? "marked" : "");
    cells.forEach((text, at) => addCell(block, index, at, text, row));
    return { row, cells };
  });
  const show = () => {
    const order = memory.sort === null ? rows : [...rows].sort((a, b) => {
      const texts = [a, b].map(({ cells }) => cells[block.columns.findIndex((column) => column.name === memory.sort)] || "");
      return compareTexts(...texts) * (memory.down && !texts.some(isLast) ? -1 : 1);
    });
    const isFound = finder(memory.find);
    for (const { row, cells } of order) {
      row.hidden = !isFound(cells.join(" "));
      body.appendChild(row);
    }
    if (live.filter && block.choose) live.filter(block.runs.filter((_, index) => !rows[index].row.hidden));
    block.columns.forEach(({ name }, at) => {
      head.children[at].setAttribute("aria-sort", memory.sort === name ? (memory.down ? "descending" : "ascending") : "none");
    });
  };
  block.columns.forEach((column) => {
    const cell = element("th", null, head, column.right ? "right" : "");
    const button = element("button", cut(column.name, LONGEST_NAME), cell);
    button.title = column.name;
    button.dataset.focus = `sort ${key} ${column.name}`;
    button.addEventListener("click", () => {
      // Up, down, then the order of the file; of a metric the best values first.
      const first = column.best === "max";
      if (memory.sort !== column.name) [memory.sort, memory.down] = [column.name, first];
      else if (memory.down === first) memory.down = !first;
      else memory.sort = null;
      show();
    });
  });
  if (find) {
    find.type = "search";
    find.placeholder = "find (a regular expression)";
    find.setAttribute("aria-label", "find rows");
    find.value = memory.find;
    find.dataset.focus = `find ${key}`;
    find.addEventListener("input", () => { memory.find = find.value; show(); });
  }
  show();
  if (block.choose && block.columns.length > 2) addColumnChoice(key, block, table, memory, tools);
}

const COLOURED = ["state", "status"];

function addCell(block, index, at, text, row) {
  const column = block.columns[at], cell = element("td", null, row, column.right ? "right" : "");
  if (!at && block.choose) return addChoice(block.runs[index], text, cell);
  cell.textContent = text;
  if (COLOURED.includes(column.name)) cell.dataset.state = text;
  if (block.choose) cell.title = text;  // Its row is one line.
  else if (text.length > 60) setWords(cell, text).classList.add("long");  // Several lines, and at least of some words.
  if (column.name === "step" && block.progress && block.progress[index] !== null) addBar(cell, block.progress[index]);
}

// How far a run is: in words, and as a bar below.
function addBar(cell, share) {
  const bar = element("progress", null, cell);
  bar.max = 1;
  bar.value = share;
  bar.setAttribute("aria-label", "steps made");
}

// Which columns are shown is in the address, as the other settings.
function addColumnChoice(key, block, table, memory, parent) {
  const list = element("details", null, parent, "columns");
  list.open = memory.choosing;
  list.addEventListener("toggle", () => { memory.choosing = list.open; });
  element("summary", "columns", list);
  const labels = element("div", null, list);
  block.columns.forEach(({ name, extra }, at) => {
    if (!at) return;
    const label = element("label", null, labels), box = element("input", null, label), cells = [...table.rows].map((row) => row.cells[at]);
    const show = (isShown) => { for (const cell of cells) cell.hidden = !isShown; };
    box.type = "checkbox";
    box.checked = state.columns.get(name) ?? !extra;
    box.dataset.focus = `column ${key} ${name}`;
    box.addEventListener("change", () => { state.columns.set(name, box.checked); show(box.checked); remember(); });
    element("span", cut(name, LONGEST_NAME), label).title = name;
    show(box.checked);
  });
}

function addChoice(run, name, cell) {
  cell.classList.add("choice");
  const row = element("div", null, cell), label = element("label", null, row), box = element("input", null, label);
  box.type = "checkbox";
  box.checked = live.isChosen(run);
  box.dataset.focus = `choose ${run}`;
  box.dataset.run = run;
  box.setAttribute("aria-label", `show ${name}`);
  box.addEventListener("change", () => {
    if (live.choose) return live.choose(run, box.checked);
    hidden[box.checked ? "delete" : "add"](run);
    redraw();
  });
  const shown = cut(name, innerWidth < 640 ? LONGEST_NAME / 2 : LONGEST_NAME);
  cell.title = name;
  element("span", null, label, "swatch").style.background = colour(run);
  if (!live.open) return element("span", shown, label);
  const link = element("a", shown, row);
  link.href = live.open(run);
  link.dataset.focus = `open ${run}`;
  return link;
}
