// Keys: j and k go through a list and open with Enter, and on the page of a row to the next and the
// previous one; u back to the list, t to the tokens, [ and ] through the samples, / to the field for
// a row_id, ? shows all of them. In a view of tokens the arrow keys go from token to token, and a
// slider through the steps that wrote them.
"use strict";
const follow = (selector) => {
  const link = document.querySelector(selector);
  if (link) link.click();
};
const through = (links, step) => {
  const at = links.indexOf(document.activeElement);
  const to = at < 0 ? (step > 0 ? 0 : -1) : at + step;
  if (to < 0 || to >= links.length) {
    follow(step > 0 ? "[rel=next]" : "[rel=prev]");
    return;
  }
  links[to].focus();
  links[to].closest("li, tr").scrollIntoView({ block: "nearest" });
};
// Without this script each token is a stop of the Tab key; with it only the one that was last there.
for (const view of document.querySelectorAll(".toks")) {
  for (const token of view.querySelectorAll(".t")) token.tabIndex = -1;
  const first = view.querySelector(".t");
  if (first) first.tabIndex = 0;
  view.addEventListener("focusin", (event) => {
    for (const token of view.querySelectorAll(".t[tabindex='0']")) token.tabIndex = -1;
    event.target.tabIndex = 0;
  });
}
const nextLine = (tokens, at, step) => {
  const here = tokens[at].getBoundingClientRect();
  let line = null, best = at, least = Infinity;
  for (let i = at + step; i >= 0 && i < tokens.length; i += step) {
    const box = tokens[i].getClientRects()[0];
    if (!box || Math.abs(box.top - here.top) < box.height / 2) continue;
    if (line === null) line = box.top;
    else if (Math.abs(box.top - line) > box.height / 2) break;
    if (Math.abs(box.left - here.left) < least) {
      best = i;
      least = Math.abs(box.left - here.left);
    }
  }
  return best;
};
const throughTokens = (event, token) => {
  const tokens = [...token.closest(".toks").querySelectorAll(".t")];
  const at = tokens.indexOf(token);
  const to = {
    ArrowLeft: () => at - 1, ArrowRight: () => at + 1, Home: () => 0, End: () => tokens.length - 1,
    ArrowUp: () => nextLine(tokens, at, -1), ArrowDown: () => nextLine(tokens, at, 1),
  }[event.key]?.();
  if (to === undefined) return false;
  event.preventDefault();
  tokens[Math.max(0, Math.min(to, tokens.length - 1))].focus();
  return true;
};
document.addEventListener("keydown", (event) => {
  const at = event.target;
  const isWriting = at instanceof Element
    && at.closest("input:not([type=radio]):not([type=checkbox]), select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || isWriting) return;
  if (at instanceof Element && at.matches(".toks .t") && throughTokens(event, at)) return;
  const current = document.querySelector(".tabs .current");
  const listed = [...document.querySelectorAll("a.id")];
  const step = { j: 1, k: -1 }[event.key];
  const links = {
    j: "[rel=next]", k: "[rel=prev]", u: "[rel=up]", t: ".tokens-link",
  };
  const find = document.getElementById("find-id");
  if (event.key === "/" && find) {
    event.preventDefault();
    find.focus();
  } else if (event.key === "?") {
    document.getElementById("keys").togglePopover();
  } else if (step && listed.length) {
    through(listed, step);
  } else if (event.key === "[" && current && current.previousElementSibling) {
    current.previousElementSibling.click();
  } else if (event.key === "]" && current && current.nextElementSibling) {
    current.nextElementSibling.click();
  } else if (links[event.key]) {
    follow(links[event.key]);
  }
});
// The film of a row: its tokens as they were after each step. Those of the step have a frame.
for (const film of document.querySelectorAll(".film")) {
  const slider = film.querySelector("input");
  const tokens = film.closest(".tv").querySelectorAll("[data-s]");
  film.hidden = false;
  slider.addEventListener("input", () => {
    const at = Number(slider.value);
    film.querySelector("output").value = `${at} of ${slider.max}`;
    for (const token of tokens) {
      const step = Number(token.dataset.s);
      token.classList.toggle("masked", step > at);
      token.classList.toggle("now", step === at && at < Number(slider.max));
    }
  });
}
