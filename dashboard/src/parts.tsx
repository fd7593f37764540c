// Small things that every view is made of.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { visible } from "./format";
import type { Loaded } from "./request";
import { href, place } from "./route";

/** What is `doubtful` is shown as neither a success nor as going on. */
export function Status({ value, doubtful }: { value: string; doubtful?: boolean }) {
  return (
    <span class={`status ${doubtful && ["succeeded", "running"].includes(value) ? "doubtful" : value}`}>
      <i />
      {value}
    </span>
  );
}

export function Tag({ children, title }: { children: ComponentChildren; title?: string }) {
  return (
    <span class="tag" title={title}>
      {legible(children)}
    </span>
  );
}

/** Text that may be anybody's, with what cannot be seen made visible; anything else as it is. */
function legible(given: ComponentChildren): ComponentChildren {
  return typeof given === "string" ? visible(given) : given;
}

interface HeadProperties {
  title: string;
  note?: string;
  /** What the copied link also says, such as the runs that are shown now. */
  link?: Record<string, string | undefined>;
  children?: ComponentChildren;
}

/** A view's title line: its name, what is counted, and its controls. */
export function Head({ title, note, link = {}, children }: HeadProperties) {
  const { path, query } = place.value;
  const address = () => new URL(href(path, { ...link, ...Object.fromEntries(query) }), location.href).href;
  return (
    <header class="view-head">
      <h1>{legible(title)}</h1>
      {note && <span class="note">{note}</span>}
      <div class="controls">
        {children}
        <Copy text={address} label="link to this view" name="copy link" />
      </div>
    </header>
  );
}

interface WaitingProperties<T> {
  loaded: Loaded<T>;
  /** What is being done, where it may take seconds. */
  doing?: string;
  children: (data: T) => ComponentChildren;
}

/** What `loaded` brought, or why there is nothing yet. */
export function Waiting<T>({ loaded, doing, children }: WaitingProperties<T>) {
  if (loaded.data !== undefined) return <>{children(loaded.data)}</>;
  if (loaded.error) return <Failed message={loaded.error.message} again={loaded.reload} />;
  return (
    <>
      {doing && <p class="note">{doing}</p>}
      <p class="waiting" aria-busy="true" />
    </>
  );
}

export function Failed({ message, again }: { message: string; again?: () => void }) {
  return (
    <div class="empty" role="alert">
      <p>{message}</p>
      {again && (
        <button type="button" onClick={again}>
          Try again
        </button>
      )}
    </div>
  );
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <div class="empty">{children}</div>;
}

export function Tabs({ label, tabs, now }: { label: string; tabs: [name: string, href: string][]; now: string }) {
  const bar = useCurrentInSight(now);
  return (
    <nav class="tabs" aria-label={label} ref={bar}>
      {tabs.map(([name, href]) => (
        <a href={href} key={name} aria-current={name.toLowerCase() === now ? "page" : undefined}>
          {name}
        </a>
      ))}
    </nav>
  );
}

/** For a bar of links that may be wider than a phone: the one to where we are, `now`, is brought into sight. */
export function useCurrentInSight(now: string) {
  const bar = useRef<HTMLElement>(null);
  useEffect(() => {
    const link = bar.current?.querySelector("[aria-current]")?.getBoundingClientRect();
    const whole = bar.current?.getBoundingClientRect();
    if (link && whole) bar.current?.scrollBy(link.left - whole.left - (whole.width - link.width) / 2, 0);
  }, [now]);
  return bar;
}

/** One of a few choices, side by side. */
export function Choice<T extends string>(properties: {
  label: string;
  options: readonly T[];
  value: T;
  /** What each option means. */
  titles?: Partial<Record<T, string>>;
  choose: (value: T) => void;
}) {
  const { label, options, value, titles = {} as Partial<Record<T, string>>, choose } = properties;
  return (
    <div class="choice" role="group" aria-label={label}>
      {options.map((option) => (
        <button
          type="button"
          key={option}
          title={titles[option]}
          aria-pressed={option === value}
          onClick={() => choose(option)}
        >
          {option}
        </button>
      ))}
    </div>
  );
}

/** Names and values, in two columns. */
export function Facts({ facts }: { facts: [name: string, value: ComponentChildren][] }) {
  return (
    <dl class="facts">
      {facts
        .filter(([, value]) => value !== null && value !== undefined && value !== "")
        .map(([name, value]) => (
          <div key={name}>
            <dt>{legible(name)}</dt>
            <dd>{legible(value)}</dd>
          </div>
        ))}
    </dl>
  );
}

/** Text somebody else wrote: as it is, with what cannot be seen made visible. */
export function Foreign({ text }: { text: string }) {
  return <>{text.split("\n").map((line, place) => (place ? `\n${visible(line)}` : visible(line)))}</>;
}

export function Code({ text, label }: { text: string; label: string }) {
  return (
    <div class="code">
      <Copy text={text} label={label} />
      <pre tabIndex={0}>
        <Foreign text={text} />
      </pre>
    </div>
  );
}

async function put(text: string): Promise<void> {
  if (window.isSecureContext) return navigator.clipboard.writeText(text);
  // Over plain HTTP from another machine there is no clipboard but the old one.
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

function Copy({ text, label, name = "copy" }: { text: string | (() => string); label: string; name?: string }) {
  const [said, setSaid] = useState("");
  const copy = async () => {
    try {
      await put(typeof text === "string" ? text : text());
      setSaid("copied");
    } catch {
      setSaid("not copied"); // the browser refused
    }
    setTimeout(() => setSaid(""), 1500);
  };
  return (
    <button type="button" class="quiet" onClick={() => void copy()} aria-label={`Copy ${label}`}>
      {said || name}
    </button>
  );
}

export function Json({ value, label }: { value: unknown; label: string }) {
  return <Code text={JSON.stringify(value, null, 2) ?? ""} label={label} />;
}

/** A share of a whole as a bar, with the figure beside it. */
export function Bar({ share, children }: { share: number; children?: ComponentChildren }) {
  return (
    <span class="bar">
      <i style={{ width: `${Math.max(0, Math.min(1, share)) * 100}%` }} />
      <b>{children}</b>
    </span>
  );
}

const SHADES = 7;

/** The lowest and the highest of some values; undefined where there are no two. */
export function rangeOf(values: (number | null | undefined)[]): [number, number] | undefined {
  const known = values.filter((value) => value !== null && value !== undefined);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  return low < high ? [low, high] : undefined;
}

/** The class of a value's shade within the range that was seen: the higher, the stronger. */
export function shade(value: number | null | undefined, range: [number, number] | undefined): string {
  if (value === null || value === undefined || range === undefined) return "";
  const share = (value - range[0]) / (range[1] - range[0]);
  return `shade-${Math.round(Math.max(0, Math.min(1, share)) * (SHADES - 1))}`;
}

/** A number on a line through zero: what is above goes right, what is below goes left. */
export function Balance({ value, most }: { value: number | null | undefined; most: number }) {
  if (value === null || value === undefined) return <span class="muted">–</span>;
  const width = most > 0 ? (Math.abs(value) / most) * 50 : 0;
  return (
    <span class={`balance ${value < 0 ? "below" : "above"}`} aria-hidden="true">
      <i style={{ width: `${width}%`, left: `${value < 0 ? 50 - width : 50}%` }} />
    </span>
  );
}
