// Tables that sort by a click on a column, filter their rows, and choose runs.

const CLOCK = /^(\d+):(\d\d)(?::(\d\d))?\b/;
function valueOf(text) {
  const clock = CLOCK.exec(text);
  if (clock) return clock[3] === undefined ? clock[1] * 60 + +clock[2] : clock[1] * 3600 + clock[2] * 60 + +clock[3];
  const plain = text.replace(/,/g, ""), value = parseFloat(plain);
  return /^[-+]?(\d|\.\d|nan|inf)/i.test(plain) && !Number.isNaN(value) ? value : null;
}

function compareTexts(a, b) {
  if (a === "" || b === "") return (a === "") - (b === "");
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
  const find = block.filter && (block.rows.length > 12 || memory.find || live.filter) ? element("input", null, parent) : null;
  const box = makeScrollable(element("div", null, parent, "box"), block.title || key.split("/")[0]), table = element("table", null, box);
  box.addEventListener("scroll", () => { memory.scroll = box.scrollTop; });
  requestAnimationFrame(() => { box.scrollTop = memory.scroll || 0; });
  const head = element("tr", null, element("thead", null, table)), body = element("tbody", null, table);
  const rows = block.rows.map((cells, index) => {
    const row = element("tr", null, null, (block.marked || []).includes(index) ? "marked" : "");
    cells.forEach((text, at) => {
      const isChoice = !at && block.choose;
      const cell = element("td", isChoice ? null : text, row, block.columns[at].right ? "right" : "");
      if (isChoice) addChoice(block.runs[index], text, cell);
      if (text.length > 60) cell.classList.add("long");  // Else many short columns would squeeze it to a word a line.
    });
    return { row, cells };
  });
  const show = () => {
    const order = memory.sort === null ? rows : [...rows].sort((a, b) => {
      const texts = [a.cells[memory.sort], b.cells[memory.sort]];
      return compareTexts(...texts) * (memory.down && !texts.includes("") ? -1 : 1);
    });
    const isFound = finder(memory.find);
    for (const { row, cells } of order) {
      row.hidden = !isFound(cells.join(" "));
      body.appendChild(row);
    }
    if (live.filter && block.choose) live.filter(block.runs.filter((_, index) => !rows[index].row.hidden));
    [...head.children].forEach((cell, at) => cell.setAttribute("aria-sort", memory.sort === at ? (memory.down ? "descending" : "ascending") : "none"));
  };
  block.columns.forEach((column, at) => {
    const cell = element("th", null, head, column.right ? "right" : "");
    const button = element("button", cut(column.name, LONGEST_NAME), cell);
    button.title = column.name;
    button.dataset.focus = `sort ${key} ${column.name}`;
    button.addEventListener("click", () => {
      // Up, down, then the order of the file.
      if (memory.sort !== at) [memory.sort, memory.down] = [at, false];
      else if (!memory.down) memory.down = true;
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
}

function addChoice(run, name, cell) {
  cell.classList.add("choice");
  const row = element("div", null, cell), label = element("label", null, row), box = element("input", null, label);
  box.type = "checkbox";
  box.checked = live.isChosen(run);
  box.dataset.focus = `choose ${run}`;
  box.setAttribute("aria-label", `show ${name}`);
  box.addEventListener("change", () => {
    if (live.choose) return live.choose(run, box.checked);
    hidden[box.checked ? "delete" : "add"](run);
    redraw();
  });
  element("span", null, label, "swatch").style.background = live.colour ? live.colour(run) : colourOfRun(run);
  if (!live.open) return element("span", name, label);
  const link = element("a", name, row);
  link.href = live.open(run);
  link.dataset.focus = `open ${run}`;
  return link;
}
