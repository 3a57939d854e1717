// Tables that are sorted by a click on a title. Rows are made as they are scrolled to, so that thousands cost nothing.

const CHUNK = 100;

// columns: {title, hint, value(row) to sort by, cell(row) to show, numeric}; choose(row) opens one, where it is given.
function makeTable(host, label, columns, rows, { choose = null, sorted = null, descending = true, keyOf = null } = {}) {
  const head = make("thead");
  const body = make("tbody");
  const table = make("table", { "aria-label": label, "aria-rowcount": rows.length }, head, body);
  host.replaceChildren(table);
  const state = { column: sorted, falls: descending, passes: () => true, shown: [], made: 0, onChange: () => {} };

  const titles = columns.map((column, place) => {
    const button = make("button", { title: column.hint, onclick: () => sortBy(place) }, column.title);
    return make("th", { scope: "col", class: column.numeric ? "number" : null }, button);
  });
  head.append(make("tr", {}, titles));

  function sortBy(place) {
    state.falls = state.column === place ? !state.falls : Boolean(columns[place].numeric);
    state.column = place;
    arrange();
  }

  function arrange() {
    state.shown = rows.filter(state.passes);
    if (state.column !== null) {
      const value = columns[state.column].value;
      const sign = state.falls ? -1 : 1;
      const keys = new Map(state.shown.map((row) => [row, value(row)]));
      state.shown.sort((one, other) => compared(keys.get(one), keys.get(other), sign));
    }
    titles.forEach((title, place) => {
      if (place === state.column) title.setAttribute("aria-sort", state.falls ? "descending" : "ascending");
      else title.removeAttribute("aria-sort");
    });
    body.replaceChildren();
    state.made = 0;
    more();
    host.scrollTop = 0;
    state.onChange(state.shown.length, rows.length);
  }

  function more(until = state.made + CHUNK) {
    const fresh = state.shown.slice(state.made, until).map(lineOf);
    state.made += fresh.length;
    body.append(...fresh);
  }

  function lineOf(row) {
    const cells = columns.map((column) => make("td", { class: column.numeric ? "number" : null }, column.cell(row)));
    const line = make("tr", choose ? { tabindex: 0, class: "choosable" } : {}, cells);
    if (keyOf) line.dataset.key = keyOf(row);
    if (choose) {
      line.addEventListener("click", () => choose(row, line));
      line.addEventListener("keydown", (event) => walk(event, line, row));
    }
    return line;
  }

  function walk(event, line, row) {
    if (event.key === "Enter" || event.key === " ") choose(row, line);
    else if (event.key === "ArrowDown") {
      if (!line.nextElementSibling) more();
      line.nextElementSibling?.focus();
    } else if (event.key === "ArrowUp") line.previousElementSibling?.focus();
    else return;
    event.preventDefault();
  }

  host.addEventListener("scroll", () => {
    if (host.scrollTop + 2 * host.clientHeight > host.scrollHeight) more();
  });
  window.addEventListener("beforeprint", () => more(state.shown.length));
  arrange();
  return {
    filter(passes) {
      state.passes = passes;
      arrange();
    },
    onChange(told) {
      state.onChange = told;
      told(state.shown.length, rows.length);
    },
  };
}

// What is not known comes last, whichever way a column is sorted.
function compared(one, other, sign) {
  const none = [one, other].map((x) => x === null || x === undefined || x === "");
  if (none[0] || none[1]) return none[0] - none[1];
  if (typeof one === "string") return sign * one.localeCompare(other, "en", { numeric: true });
  return sign * (one - other);
}

// A field that filters a table by words in what `text(row)` says, with a list of choices beside it.
function filterTools(host, table, { label, text, choices = [] }) {
  const search = make("input", { type: "search", placeholder: label, "aria-label": label, autocomplete: "off" });
  const select = make("select", { "aria-label": "Show" }, choices.map(([name], place) => make("option", { value: place }, name)));
  const shown = make("output");
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = choices.length ? choices[Number(select.value)][1] : () => true;
    table.filter((row) => chosen(row) && words.every((word) => text(row).toLowerCase().includes(word)));
  };
  search.addEventListener("input", apply);
  select.addEventListener("change", apply);
  host.append(search, ...(choices.length ? [select] : []), shown);
  table.onChange((some, all) => {
    shown.textContent = some === all ? count(all) : `${count(some)} of ${count(all)}`;
  });
  apply();
}
