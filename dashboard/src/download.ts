// A chart as a file: its values as CSV, or its picture as PNG with a title and a legend.
import type { Line } from "./chart";
import { color } from "./theme";

const TITLE = 26; // pixels of the picture
const ENTRY = 18;

export function saveCsv(title: string, x: string, lines: Line[]): void {
  const rows: (string | number)[][] = [["line", x, title, "low", "high"]];
  for (const line of lines) {
    line.y.forEach((y, place) => {
      if (y !== null) rows.push([line.name, line.x[place] ?? "", y, line.low?.[place] ?? "", line.high?.[place] ?? ""]);
    });
  }
  const text = rows.map((row) => row.map(cell).join(",")).join("\n");
  save(new Blob([`${text}\n`], { type: "text/csv" }), `${fileName(title)}.csv`);
}

/** A text that a spreadsheet takes for a formula is marked as text. */
function cell(value: string | number): string {
  if (typeof value === "number") return String(value);
  const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function savePng(title: string, plot: HTMLCanvasElement, lines: Line[]): void {
  const scale = plot.width / plot.clientWidth || 1;
  const picture = document.createElement("canvas");
  picture.width = plot.width;
  picture.height = plot.height + (TITLE + ENTRY * lines.length + 6) * scale;
  const drawn = picture.getContext("2d");
  if (drawn === null) return;
  drawn.fillStyle = color("--panel");
  drawn.fillRect(0, 0, picture.width, picture.height);
  drawn.drawImage(plot, 0, TITLE * scale);
  drawn.scale(scale, scale);
  drawn.fillStyle = color("--text");
  drawn.font = "600 13px system-ui";
  drawn.fillText(title, 8, 18);
  drawn.font = "11px system-ui";
  lines.forEach((line, place) => {
    const top = TITLE + plot.height / scale + ENTRY * place;
    drawn.fillStyle = color(line.color);
    drawn.fillRect(8, top + 3, 10, 10);
    drawn.fillStyle = color("--text");
    drawn.fillText(line.name, 24, top + 12);
  });
  picture.toBlob((blob) => blob && save(blob, `${fileName(title)}.png`));
}

function fileName(title: string): string {
  return title.replace(/[^\w.-]+/g, "_");
}

function save(content: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
