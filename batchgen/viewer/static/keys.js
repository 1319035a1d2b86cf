// Keys: j and k go to the next and the previous row, u back to the list, t to the tokens,
// [ and ] through the samples, / to the field for a row_id.
"use strict";
document.addEventListener("keydown", (event) => {
  const at = event.target;
  const isWriting = at instanceof Element && at.closest("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || isWriting) return;
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("find-id").focus();
    return;
  }
  const current = document.querySelector(".tabs .current");
  const links = {
    j: "[rel=next]", k: "[rel=prev]", u: "[rel=up]", t: ".tokens-link",
  };
  const link = event.key === "[" ? current && current.previousElementSibling
    : event.key === "]" ? current && current.nextElementSibling
    : links[event.key] && document.querySelector(links[event.key]);
  if (link) link.click();
});
