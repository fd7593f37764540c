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

export function may(scope: "grader" | "trainer" | "admin"): boolean {
  const now = session.value;
  return now !== null && (scope === "admin" ? now.admin : now.admin || now.scopes.includes(scope));
}
