// Sortable tables. Rows are created while scrolling, so that thousands of rows stay fast.

const CHUNK = 100;

// columns: {title, hint, value(row) to sort by, cell(row) to show, numeric}; choose(row), if given, opens a row.
function makeTable(host, label, columns, rows, { choose = null, sorted = null, descending = true, keyOf = null } = {}) {
  const head = createElement("thead");
  const body = createElement("tbody");
  const table = createElement("table", { "aria-label": label, "aria-rowcount": rows.length }, head, body);
  host.replaceChildren(table);
  const state = { column: sorted, isDescending: descending, matches: () => true, shown: [], rendered: 0, onChange: () => {} };

  const titles = columns.map((column, index) => {
    const button = createElement("button", { title: column.hint, onclick: () => sortBy(index) }, column.title);
    return createElement("th", { scope: "col", class: column.numeric ? "number" : null }, button);
  });
  head.append(createElement("tr", {}, titles));

  function sortBy(index) {
    state.isDescending = state.column === index ? !state.isDescending : Boolean(columns[index].numeric);
    state.column = index;
    arrange();
  }

  function arrange() {
    state.shown = rows.filter(state.matches);
    if (state.column !== null) {
      const value = columns[state.column].value;
      const sign = state.isDescending ? -1 : 1;
      const keys = new Map(state.shown.map((row) => [row, value(row)]));
      state.shown.sort((one, other) => compareValues(keys.get(one), keys.get(other), sign));
    }
    titles.forEach((title, index) => {
      if (index === state.column) title.setAttribute("aria-sort", state.isDescending ? "descending" : "ascending");
      else title.removeAttribute("aria-sort");
    });
    body.replaceChildren();
    state.rendered = 0;
    showMore();
    host.scrollTop = 0;
    state.onChange(state.shown.length, rows.length);
  }

  function showMore(until = state.rendered + CHUNK) {
    const fresh = state.shown.slice(state.rendered, until).map(createRow);
    state.rendered += fresh.length;
    body.append(...fresh);
  }

  function createRow(row) {
    const cells = columns.map((column) => createElement("td", { class: column.numeric ? "number" : null }, column.cell(row)));
    const line = createElement("tr", choose ? { tabindex: 0, class: "choosable" } : {}, cells);
    if (keyOf) line.dataset.key = keyOf(row);
    if (choose) {
      line.addEventListener("click", () => choose(row, line));
      line.addEventListener("keydown", (event) => handleKey(event, line, row));
    }
    return line;
  }

  function handleKey(event, line, row) {
    if (event.key === "Enter" || event.key === " ") choose(row, line);
    else if (event.key === "ArrowDown") {
      if (!line.nextElementSibling) showMore();
      line.nextElementSibling?.focus();
    } else if (event.key === "ArrowUp") line.previousElementSibling?.focus();
    else return;
    event.preventDefault();
  }

  host.addEventListener("scroll", () => {
    if (host.scrollTop + 2 * host.clientHeight > host.scrollHeight) showMore();
  });
  window.addEventListener("beforeprint", () => showMore(state.shown.length));
  arrange();
  return {
    filter(matches) {
      state.matches = matches;
      arrange();
    },
    onChange(callback) {
      state.onChange = callback;
      callback(state.shown.length, rows.length);
    },
  };
}

// Unknown values come last in both directions.
function compareValues(one, other, sign) {
  const none = [one, other].map((x) => x === null || x === undefined || x === "");
  if (none[0] || none[1]) return none[0] - none[1];
  if (typeof one === "string") return sign * one.localeCompare(other, "en", { numeric: true });
  return sign * (one - other);
}

// A field that filters a table by words of `text(row)`, with an optional list of choices.
function addFilterTools(host, table, { label, text, choices = [] }) {
  const search = createElement("input", { type: "search", placeholder: label, "aria-label": label, autocomplete: "off" });
  const select = createElement("select", { "aria-label": "Show" }, choices.map(([name], index) => createElement("option", { value: index }, name)));
  const shown = createElement("output");
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = choices.length ? choices[Number(select.value)][1] : () => true;
    table.filter((row) => chosen(row) && words.every((word) => text(row).toLowerCase().includes(word)));
  };
  search.addEventListener("input", apply);
  select.addEventListener("change", apply);
  host.append(search, ...(choices.length ? [select] : []), shown);
  table.onChange((some, all) => {
    shown.textContent = some === all ? formatCount(all) : `${formatCount(some)} of ${formatCount(all)}`;
  });
  apply();
}
