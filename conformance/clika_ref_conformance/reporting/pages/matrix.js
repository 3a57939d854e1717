"use strict";
// Text from the report is only ever set as textContent: names of operators and messages are untrusted.
const data = JSON.parse(document.getElementById("data").textContent);
const panel = document.getElementById("panel");
const sections = [...document.querySelectorAll("main > section")];
const links = [...document.querySelectorAll("nav a")];

function make(tag, text, style) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (style) element.className = style;
  return element;
}

function table(rows) {
  const result = make("table");
  for (const [name, value] of rows) {
    const row = make("tr");
    row.append(make("th", name), make("td", value));
    result.append(row);
  }
  return result;
}

function article(detail) {
  const result = make("article");
  result.append(make("span", detail.verdict, "verdict " + detail.style), make("p", detail.place));
  if (detail.message) result.append(make("pre", detail.message));
  result.append(table(detail.measures));
  if (detail.facts.length) result.append(make("h4", "Call"), table(detail.facts));
  if (detail.listing) result.append(make("h4", "Graph"), make("pre", detail.listing));
  if (detail.href) {
    const link = make("a", detail.reproducer);
    link.href = detail.href;
    const line = make("h4", "Reproducer ");
    line.append(link);
    result.append(line, make("pre", detail.commands));
  }
  return result;
}

function open(button) {
  const content = document.getElementById("content");
  content.replaceChildren(make("h3", button.title));
  for (const index of button.dataset.d.split(" ").filter(Boolean)) content.append(article(data[index]));
  panel.hidden = false;
  panel.scrollTop = 0;
}

function filter() {
  const word = document.getElementById("find").value.trim().toLowerCase();
  const failing = document.getElementById("failing").checked;
  for (const row of document.querySelectorAll(".matrix tbody tr")) {
    const name = row.querySelector("th").textContent.toLowerCase();
    row.hidden = (word && !name.includes(word)) || (failing && !row.classList.contains("failing"));
  }
}

function show() {
  const named = (id) => sections.find((section) => section.id === id);
  const chosen = named(decodeURIComponent(location.hash.slice(1))) || named("level-operators") || sections[0];
  for (const section of sections) section.hidden = section !== chosen;
  for (const link of links) link.classList.toggle("here", link.hash === "#" + chosen.id);
}

document.querySelector("main").addEventListener("click", (event) => {
  if (event.target.matches("button[data-d]")) open(event.target);
});
document.getElementById("close").addEventListener("click", () => { panel.hidden = true; });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") panel.hidden = true; });
document.getElementById("find").addEventListener("input", filter);
document.getElementById("failing").addEventListener("change", filter);
window.addEventListener("hashchange", show);
show();
