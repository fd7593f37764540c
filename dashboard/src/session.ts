// Who is looking, and what they may do. The key itself is sent once and kept nowhere in the page.
import { signal } from "@preact/signals";
import type { Session } from "./api";
import { connect } from "./live";
import { locked, Refused, request } from "./request";

export const session = signal<Session | null>(null);

/** Why there is no session, other than that a key is wanted. */
export const trouble = signal("");

async function enter(method: string, body?: unknown): Promise<void> {
  session.value = await request<Session>(method, "dashboard/session", body);
  locked.value = false;
  trouble.value = "";
  connect(() => void begin());
}

const AGAIN = 5000; // milliseconds

export async function begin(): Promise<void> {
  try {
    await enter("GET");
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (locked.value) return;
    if (session.value === null) trouble.value = error.message;
    else setTimeout(() => void begin(), AGAIN); // what is shown stays, until the server is back
  }
}

export async function logIn(key: string): Promise<void> {
  await enter("POST", { key });
}

export async function logOut(): Promise<void> {
  await request("DELETE", "dashboard/session");
  location.reload();
}

/** Why this page or the key of its viewer may not write as this scope does; empty where it may. */
export function whyNot(scope: "grader" | "trainer" | "admin"): string {
  const now = session.value;
  if (now === null) return "there is no session";
  if (now.reading) return "this page only reads";
  return now.admin || (scope !== "admin" && now.scopes.includes(scope)) ? "" : `your key lacks the scope ${scope}`;
}

export function may(scope: "grader" | "trainer" | "admin"): boolean {
  return whyNot(scope) === "";
}
