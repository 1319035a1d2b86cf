// Keys: j and k go through a list and open with Enter, and on the page of a row to the next and the
// previous one; u back to the list, t to the tokens, [ and ] through the samples, / to the field for
// a row_id, ? shows all of them.
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
document.addEventListener("keydown", (event) => {
  const at = event.target;
  const isWriting = at instanceof Element && at.closest("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || isWriting) return;
  const current = document.querySelector(".tabs .current");
  const listed = [...document.querySelectorAll("a.id")];
  const step = { j: 1, k: -1 }[event.key];
  const links = {
    j: "[rel=next]", k: "[rel=prev]", u: "[rel=up]", t: ".tokens-link",
  };
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("find-id").focus();
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
