// Sets the theme that was chosen before, ahead of the first paint. Not a module, since those wait.
{
  const chosen = localStorage.getItem("dataflow-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
