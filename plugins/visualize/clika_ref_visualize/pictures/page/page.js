"use strict";

// Folds modules of a finished picture, and moves the view.

const picture = document.getElementById("picture");
const world = document.getElementById("world");
const root = JSON.parse(document.getElementById("layout").textContent);
const elements = new Map([...world.querySelectorAll("[data-key]")].map((element) => [element.dataset.key, element]));
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const ARROW_KEY_PIXELS = 80; // distance that an arrow key moves the view
const MAX_UNFOLDED_NODES = 400; // larger models open folded, since no screen shows so many nodes

// Layout: the same algorithm as in pictures/arrangement.py.

function prepare(group, container, above) {
  group.parent = above;
  group.paths = [...container.children].filter((child) => child.dataset.route !== undefined);
  for (const member of group.members) {
    member.element = elements.get(member.key);
    member.owner = group;
    if (member.group) prepare(member.group, member.element.querySelector(":scope > .members"), member);
  }
}

function stack(group) {
  const heights = group.gaps.map(() => 0);
  for (const member of group.members) {
    if (member.group) member.height = stack(member.group);
    heights[member.layer] = Math.max(heights[member.layer], member.height);
  }
  let y = group.band + group.above;
  group.heights = heights;
  group.tops = heights.map((height, layer) => {
    const top = y;
    y += height + group.gaps[layer];
    return top;
  });
  for (const member of group.members) {
    member.y = group.tops[member.layer] + (heights[member.layer] - member.height) / 2;
  }
  group.height = group.folded ? group.band : y + group.below;
  return group.height;
}

function traceRoute(group, route) {
  const start = route.source === null ? null : group.members[route.source];
  const end = route.target === null ? null : group.members[route.target];
  let [x, layer] = route.columns[0];
  let y = start ? start.y + start.height : group.tops[layer];
  let line = `M${x} ${y}`;
  for (const [to, below] of route.columns.slice(1)) {
    const bottom = group.tops[layer] + group.heights[layer];
    const top = group.tops[below];
    const middle = (bottom + top) / 2;
    line += `V${bottom}`;
    line += to === x ? `V${top}` : `C${x} ${middle} ${to} ${middle} ${to} ${top}`;
    [x, y, layer] = [to, top, below];
  }
  return end && end.y > y ? `${line}V${end.y}` : line;
}

function positionMembers(group) {
  group.routes.forEach((route, index) => group.paths[index].setAttribute("d", traceRoute(group, route)));
  for (const member of group.members) {
    member.element.setAttribute("transform", `translate(${member.x} ${member.y})`);
    if (member.group) {
      const { folded, title, nodes } = member.group;
      member.element.classList.toggle("folded", Boolean(folded));
      member.element.querySelector(":scope > .ground").setAttribute("height", member.height);
      member.element.querySelector(":scope > .title text").textContent = folded ? `+ ${title}  ${nodes} node${nodes === 1 ? "" : "s"}` : `\u2212 ${title}`;
      member.element.querySelector(":scope > .title").setAttribute("aria-expanded", String(!folded));
      if (!folded) positionMembers(member.group);
    }
  }
}

function arrange() {
  stack(root);
  positionMembers(root);
}

// Folding

function visitGroups(group, visit) {
  for (const member of group.members) {
    if (member.group) {
      visit(member.group);
      visitGroups(member.group, visit);
    }
  }
}

function foldAll(folded) {
  visitGroups(root, (group) => { group.folded = folded; });
  arrange();
}

function toggle(member) {
  const before = positionOf(member).y;
  member.group.folded = !member.group.folded;
  arrange();
  view.y += (before - positionOf(member).y) * view.scale; // keep the title under the pointer
  applyView();
}

// The view

const view = { x: 0, y: 0, scale: 1 };

function applyView() {
  world.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.scale})`);
}

function zoom(factor, x = picture.clientWidth / 2, y = picture.clientHeight / 2) {
  const scale = Math.min(4, Math.max(0.02, view.scale * factor));
  view.x = x - (x - view.x) * (scale / view.scale);
  view.y = y - (y - view.y) * (scale / view.scale);
  view.scale = scale;
  applyView();
}

function fitWidth() {
  const box = world.getBBox();
  view.scale = Math.min(1.25, Math.max(0.02, (picture.clientWidth - 40) / box.width));
  view.x = (picture.clientWidth - box.width * view.scale) / 2 - box.x * view.scale;
  view.y = 24 - box.y * view.scale;
  applyView();
}

function positionOf(member) {
  let [x, y] = [member.x, member.y];
  for (let above = member.owner.parent; above; above = above.owner.parent) {
    x += above.x;
    y += above.y;
  }
  return { x, y };
}

picture.addEventListener("wheel", (event) => {
  event.preventDefault();
  const area = picture.getBoundingClientRect();
  if (event.ctrlKey || event.metaKey) {
    zoom(Math.exp(-event.deltaY / 300), event.clientX - area.left, event.clientY - area.top);
  } else {
    view.x -= event.deltaX;
    view.y -= event.deltaY;
    applyView();
  }
}, { passive: false });

let dragStart = null;
picture.addEventListener("pointerdown", (event) => {
  dragStart = { x: event.clientX, y: event.clientY, moved: 0 };
});
window.addEventListener("pointermove", (event) => {
  if (!dragStart) return;
  const [dx, dy] = [event.clientX - dragStart.x, event.clientY - dragStart.y];
  view.x += dx;
  view.y += dy;
  dragStart = { x: event.clientX, y: event.clientY, moved: dragStart.moved + Math.abs(dx) + Math.abs(dy) };
  picture.classList.add("dragging");
  applyView();
});
let wasDragged = false;
window.addEventListener("pointerup", () => {
  wasDragged = dragStart !== null && dragStart.moved > 4; // small movements still count as a click
  dragStart = null;
  picture.classList.remove("dragging");
});

// Clicks: titles fold modules, boxes show their details

const details = document.getElementById("details");
const membersByKey = new Map();

function selectBox(element) {
  world.querySelector(".selected")?.classList.remove("selected");
  details.hidden = !element;
  if (element) {
    element.classList.add("selected");
    details.querySelector("pre").textContent = element.querySelector(":scope > title").textContent;
  }
}

picture.addEventListener("click", (event) => {
  if (wasDragged) return;
  const title = event.target.closest(".title");
  if (title) toggle(membersByKey.get(title.parentElement.dataset.key));
  else selectBox(event.target.closest(".box"));
});
picture.addEventListener("keydown", (event) => {
  const title = event.target.closest(".title");
  if (title && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    toggle(membersByKey.get(title.parentElement.dataset.key));
  }
});
document.getElementById("close").addEventListener("click", () => selectBox(null));

// Search

const search = document.getElementById("search");
let matches = [];
let current = -1;

function textOf(member) {
  return member.element.textContent.toLowerCase();
}

function searchBoxes() {
  for (const member of matches) member.element.classList.remove("match");
  const query = search.value.trim().toLowerCase();
  const boxes = [...membersByKey.values()].filter((member) => !member.group);
  matches = query ? boxes.filter((member) => textOf(member).includes(query)) : [];
  current = -1;
  document.getElementById("count").textContent = query ? `${matches.length} found` : "";
  if (matches.length) showMatch(0);
}

function showMatch(index) {
  if (current >= 0) matches[current].element.classList.remove("match");
  current = (index + matches.length) % matches.length;
  const member = matches[current];
  for (let above = member.owner.parent; above; above = above.owner.parent) above.group.folded = false;
  arrange();
  member.element.classList.add("match");
  document.getElementById("count").textContent = `${current + 1} of ${matches.length}`;
  const { x, y } = positionOf(member);
  view.scale = Math.max(view.scale, 0.7);
  view.x = picture.clientWidth / 2 - (x + 100) * view.scale; // the middle of a typical box, which is 200 wide
  view.y = picture.clientHeight / 2 - (y + member.height / 2) * view.scale;
  applyView();
}

search.addEventListener("input", searchBoxes);
search.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    search.value = "";
    searchBoxes();
    search.blur();
  }
  if (event.key !== "Enter" || !matches.length) return;
  if (matches.length > 1 || !details.hidden) showMatch(current + (event.shiftKey ? -1 : 1));
  selectBox(matches[current].element);
});

// Buttons and keys

document.getElementById("fold").addEventListener("click", () => { foldAll(true); fitWidth(); });
document.getElementById("unfold").addEventListener("click", () => { foldAll(false); fitWidth(); });
document.getElementById("zoom-in").addEventListener("click", () => zoom(1.25));
document.getElementById("zoom-out").addEventListener("click", () => zoom(0.8));
document.getElementById("fit").addEventListener("click", fitWidth);
window.addEventListener("keydown", (event) => {
  if (event.target === search) return;
  const [right, down] = ARROWS[event.key] || [0, 0];
  if (right || down) {
    event.preventDefault();
    view.x -= right * ARROW_KEY_PIXELS;
    view.y -= down * ARROW_KEY_PIXELS;
    applyView();
  }
  if (event.key === "+" || event.key === "=") zoom(1.25);
  else if (event.key === "-") zoom(0.8);
  else if (event.key === "0") fitWidth();
  else if (event.key === "Escape") selectBox(null);
  else if (event.key === "/") {
    event.preventDefault();
    search.focus();
  }
});
window.addEventListener("resize", applyView);

// Start

function indexMembers(group) {
  for (const member of group.members) {
    membersByKey.set(member.key, member);
    if (member.group) indexMembers(member.group);
  }
}

prepare(root, world, null);
indexMembers(root);
for (const title of world.querySelectorAll(".group > .title")) {
  title.setAttribute("tabindex", "0");
  title.setAttribute("role", "button");
}
foldAll(root.nodes > MAX_UNFOLDED_NODES);
fitWidth();
