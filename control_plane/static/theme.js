// Before anything is painted: the theme that was chosen here, if one was.
const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset.theme = chosen;
