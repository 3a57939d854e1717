"use strict";

// The picture is drawn already. This moves its parts where modules are folded, and the view over it.

const picture = document.getElementById("picture");
const world = document.getElementById("world");
const root = JSON.parse(document.getElementById("layout").textContent);
const elements = new Map([...world.querySelectorAll("[data-key]")].map((element) => [element.dataset.key, element]));
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const STRIDE = 80; // pixels, by which an arrow key moves the view
const FOLDED_FROM = 400; // nodes: beyond, a model opens folded, as no screen shows so many

// Layout: as pictures/arrangement.py stacks the layers of a group and leads ways past them.

function prepare(group, container, above) {
  group.parent = above;
  group.ways = [...container.children].filter((child) => child.dataset.way !== undefined);
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

function lineOf(group, route) {
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

function place(group) {
  group.routes.forEach((route, index) => group.ways[index].setAttribute("d", lineOf(group, route)));
  for (const member of group.members) {
    member.element.setAttribute("transform", `translate(${member.x} ${member.y})`);
    if (member.group) {
      const { folded, title, nodes } = member.group;
      member.element.classList.toggle("folded", Boolean(folded));
      member.element.querySelector(":scope > .ground").setAttribute("height", member.height);
      member.element.querySelector(":scope > .title text").textContent = folded ? `+ ${title}  ${nodes} nodes` : `\u2212 ${title}`;
      member.element.querySelector(":scope > .title").setAttribute("aria-expanded", String(!folded));
      if (!folded) place(member.group);
    }
  }
}

function arrange() {
  stack(root);
  place(root);
}

// Folding

function everyGroup(group, act) {
  for (const member of group.members) {
    if (member.group) {
      act(member.group);
      everyGroup(member.group, act);
    }
  }
}

function foldAll(folded) {
  everyGroup(root, (group) => { group.folded = folded; });
  arrange();
}

function toggle(member) {
  const before = positionOf(member).y;
  member.group.folded = !member.group.folded;
  arrange();
  view.y += (before - positionOf(member).y) * view.scale; // its title stays under the pointer
  look();
}

// The view

const view = { x: 0, y: 0, scale: 1 };

function look() {
  world.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.scale})`);
}

function zoom(factor, x = picture.clientWidth / 2, y = picture.clientHeight / 2) {
  const scale = Math.min(4, Math.max(0.02, view.scale * factor));
  view.x = x - (x - view.x) * (scale / view.scale);
  view.y = y - (y - view.y) * (scale / view.scale);
  view.scale = scale;
  look();
}

function fit() {
  const box = world.getBBox();
  view.scale = Math.min(1.25, Math.max(0.02, (picture.clientWidth - 40) / box.width));
  view.x = (picture.clientWidth - box.width * view.scale) / 2 - box.x * view.scale;
  view.y = 24 - box.y * view.scale;
  look();
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
    look();
  }
}, { passive: false });

let grip = null;
picture.addEventListener("pointerdown", (event) => {
  grip = { x: event.clientX, y: event.clientY, moved: 0 };
});
window.addEventListener("pointermove", (event) => {
  if (!grip) return;
  const [dx, dy] = [event.clientX - grip.x, event.clientY - grip.y];
  view.x += dx;
  view.y += dy;
  grip = { x: event.clientX, y: event.clientY, moved: grip.moved + Math.abs(dx) + Math.abs(dy) };
  picture.classList.add("dragged");
  look();
});
let wasDragged = false;
window.addEventListener("pointerup", () => {
  wasDragged = grip !== null && grip.moved > 4; // a click with an unsteady hand is one all the same
  grip = null;
  picture.classList.remove("dragged");
});

// Clicks: titles fold, boxes show what is known of them

const details = document.getElementById("details");
const membersByKey = new Map();

function choose(element) {
  world.querySelector(".chosen")?.classList.remove("chosen");
  details.hidden = !element;
  if (element) {
    element.classList.add("chosen");
    details.querySelector("pre").textContent = element.querySelector(":scope > title").textContent;
  }
}

picture.addEventListener("click", (event) => {
  if (wasDragged) return;
  const title = event.target.closest(".title");
  if (title) toggle(membersByKey.get(title.parentElement.dataset.key));
  else choose(event.target.closest(".box"));
});
picture.addEventListener("keydown", (event) => {
  const title = event.target.closest(".title");
  if (title && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    toggle(membersByKey.get(title.parentElement.dataset.key));
  }
});
document.getElementById("close").addEventListener("click", () => choose(null));

// Search

const search = document.getElementById("search");
let found = [];
let current = -1;

function textOf(member) {
  return member.element.textContent.toLowerCase();
}

function find() {
  for (const member of found) member.element.classList.remove("found");
  const wanted = search.value.trim().toLowerCase();
  const boxes = [...membersByKey.values()].filter((member) => !member.group);
  found = wanted ? boxes.filter((member) => textOf(member).includes(wanted)) : [];
  current = -1;
  document.getElementById("count").textContent = wanted ? `${found.length} found` : "";
  if (found.length) show(0);
}

function show(index) {
  if (current >= 0) found[current].element.classList.remove("found");
  current = (index + found.length) % found.length;
  const member = found[current];
  for (let above = member.owner.parent; above; above = above.owner.parent) above.group.folded = false;
  arrange();
  member.element.classList.add("found");
  document.getElementById("count").textContent = `${current + 1} of ${found.length}`;
  const { x, y } = positionOf(member);
  view.scale = Math.max(view.scale, 0.7);
  view.x = picture.clientWidth / 2 - (x + 100) * view.scale; // near the middle of a box, most being 200 wide
  view.y = picture.clientHeight / 2 - (y + member.height / 2) * view.scale;
  look();
}

search.addEventListener("input", find);
search.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    search.value = "";
    find();
    search.blur();
  }
  if (event.key !== "Enter" || !found.length) return;
  if (found.length > 1 || !details.hidden) show(current + (event.shiftKey ? -1 : 1));
  choose(found[current].element);
});

// Buttons and keys

document.getElementById("fold").addEventListener("click", () => { foldAll(true); fit(); });
document.getElementById("unfold").addEventListener("click", () => { foldAll(false); fit(); });
document.getElementById("closer").addEventListener("click", () => zoom(1.25));
document.getElementById("farther").addEventListener("click", () => zoom(0.8));
document.getElementById("fit").addEventListener("click", fit);
window.addEventListener("keydown", (event) => {
  if (event.target === search) return;
  const [right, down] = ARROWS[event.key] || [0, 0];
  if (right || down) {
    event.preventDefault();
    view.x -= right * STRIDE;
    view.y -= down * STRIDE;
    look();
  }
  if (event.key === "+" || event.key === "=") zoom(1.25);
  else if (event.key === "-") zoom(0.8);
  else if (event.key === "0") fit();
  else if (event.key === "Escape") choose(null);
  else if (event.key === "/") {
    event.preventDefault();
    search.focus();
  }
});
window.addEventListener("resize", look);

// Begin

function note(group) {
  for (const member of group.members) {
    membersByKey.set(member.key, member);
    if (member.group) note(member.group);
  }
}

prepare(root, world, null);
note(root);
for (const title of world.querySelectorAll(".group > .title")) {
  title.setAttribute("tabindex", "0");
  title.setAttribute("role", "button");
}
foldAll(root.nodes > FOLDED_FROM);
fit();
