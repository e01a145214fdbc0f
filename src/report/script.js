// The page holds everything without this: it copies commands, opens folds that a link leads into, sorts and filters tables, and
// shows where a table goes on.
(() => {
  const each = (selector, act) => document.querySelectorAll(selector).forEach(act);
  const make = (tag, parts) => Object.assign(document.createElement(tag), parts);

  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();

  const copy = async (command, button) => {
    try {
      await navigator.clipboard.writeText(command.textContent);
    } catch {
      getSelection().selectAllChildren(command);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  };
  each(".command", (command) => {
    const button = make("button", { className: "copy", type: "button", textContent: "copy" });
    button.onclick = () => copy(command, button);
    const frame = make("div", { className: "copyable" });
    command.replaceWith(frame);
    frame.append(command, button);
  });

  const search = (placeholder, act) => {
    const filter = make("input", { type: "search", className: "filter", placeholder });
    filter.setAttribute("aria-label", placeholder);
    filter.oninput = () => act(filter.value.trim().toLowerCase());
    return filter;
  };

  const units = { ns: 1, "µs": 1e3, ms: 1e6, s: 1e9 };
  const value = (row, column) => {
    const text = row.cells[column] ? row.cells[column].textContent.replace(/[✗✓▲?!,]/g, "").trim() : "";
    const power = text.match(/^2\^(-?\d+)/);
    const number = text.match(/^(-?[\d.]+(?:e-?\d+)?)(?: (ns|µs|ms|s)\b)?/);
    if (power) return 2 ** power[1];
    return number ? number[1] * (units[number[2]] || 1) : text.toLowerCase();
  };
  const ascending = (a, b) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a < b ? -1 : a > b ? 1 : 0;
  };
  const sort = (table, column, head) => {
    const down = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
    table.querySelectorAll("thead [aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
      rows.sort((a, b) => down * ascending(value(a, column), value(b, column))).forEach((row) => body.append(row));
    }
  };
  const heads = (table) => {
    const taken = [], found = [];
    [...table.tHead.rows].forEach((row, line) => {
      let column = 0;
      for (const cell of row.cells) {
        while ((taken[line] ||= [])[column]) column++;
        for (let down = 0; down < cell.rowSpan; down++)
          for (let across = 0; across < cell.colSpan; across++) (taken[line + down] ||= [])[column + across] = true;
        if (cell.colSpan === 1 && line + cell.rowSpan === table.tHead.rows.length) found.push([cell, column]);
        column += cell.colSpan;
      }
    });
    return found;
  };
  each("table:not(.pairs)", (table) => {
    const rows = table.querySelectorAll("tbody tr:not(.group)");
    if (!table.tHead || rows.length < 2) return;
    for (const [head, column] of heads(table)) {
      head.classList.add("sorts");
      head.tabIndex = 0;
      head.title = "sort";
      head.onclick = () => sort(table, column, head);
      head.onkeydown = (event) => event.key === "Enter" && sort(table, column, head);
    }
    if (rows.length < 10) return;
    const filter = search(`filter ${rows.length} rows`, (wanted) =>
      rows.forEach((row) => (row.hidden = !row.textContent.toLowerCase().includes(wanted)))
    );
    table.closest(".scroll").before(filter);
  });
  each("#operators", (section) => {
    const operators = section.querySelectorAll(".operator");
    if (operators.length < 10) return;
    const filter = search(`filter ${operators.length} operators`, (wanted) => {
      operators.forEach((operator) => (operator.hidden = !operator.id.slice("operator-".length).includes(wanted)));
      section.querySelectorAll(".family").forEach((family) => {
        family.hidden = !family.querySelector(".operator:not([hidden])");
        if (wanted) family.open = true;
      });
    });
    section.querySelector(".family").before(filter);
  });

  const edges = (frame) => {
    const rest = frame.scrollWidth - frame.clientWidth;
    frame.classList.toggle("more-right", rest - frame.scrollLeft > 1);
    frame.classList.toggle("more-left", frame.scrollLeft > 1);
  };
  const watch = new ResizeObserver((entries) => entries.forEach((entry) => edges(entry.target)));
  each(".scroll", (frame) => {
    frame.addEventListener("scroll", () => edges(frame), { passive: true });
    watch.observe(frame);
  });
})();
