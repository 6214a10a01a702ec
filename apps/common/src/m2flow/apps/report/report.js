"use strict";
const choice = document.getElementById("iteration");
if (choice) {
  choice.addEventListener("change", () => {
    for (const chart of document.querySelectorAll(".iteration")) {
      chart.hidden = chart.dataset.iteration !== choice.value;
    }
  });
}
