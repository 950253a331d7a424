"use strict";
// What a link or the printer asks for must not stay folded.
(() => {
  const unfold = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const folded = target && target.querySelector(":scope > details");
    if (folded) folded.open = true;
  };
  addEventListener("hashchange", unfold);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((folded) => { folded.open = true; }));
  unfold();
})();
