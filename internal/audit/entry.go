// Package audit keeps the record of who did what: every call of a tool, every
// refusal, and every change of keys, rules and credentials. Entries of one run
// of a node are chained by hashes under the fleet's key, so that one that is
// missing or was changed shows. They are written in groups, and nobody waits for
// that.
package audit

import (
	"encoding/json"
	"time"
)

// Kind is what an entry is about.
type Kind string

// Kinds of entries.
const (
	KindCall       Kind = "call"       // a tool, or another MCP request
	KindMessage    Kind = "message"    // a message for a device
	KindDevice     Kind = "device"     // approve, revoke, forget, rotate, rename and the like; Action says which
	KindKey        Kind = "key"        // an API key was made or revoked
	KindPolicy     Kind = "policy"     // the rules of the tool guard changed
	KindRefusal    Kind = "refusal"    // of a request that is none of the above
	KindRun        Kind = "run"        // the node started, or stopped cleanly
	KindCredential Kind = "credential" // activation keys, admission by proof
)

// Entry is one line of the record.
type Entry struct {
	At   time.Time `json:"at"`
	Kind Kind      `json:"kind"`
	// Call is the id of a call, raw request or message; empty in older entries.
	Call string `json:"call,omitempty"`
	// Action is the tool or MCP method that was called, the message's type, or
	// what was done to a device, key or policy.
	Action string `json:"action"`
	Device string `json:"device,omitempty"`
	// Key and Name are the caller's, Via and From the way in and the peer.
	Key  string `json:"key,omitempty"`
	Name string `json:"name,omitempty"`
	Via  string `json:"via,omitempty"`
	From string `json:"from,omitempty"`
	// Digest is the SHA-256 of the arguments as they were given; zero if there
	// were none. Arguments are kept only where a rule says so.
	Digest    Hash            `json:"digest,omitzero"`
	Arguments json.RawMessage `json:"arguments,omitempty"`
	// Cut says that the arguments were to be kept and are too long for that.
	Cut bool `json:"arguments_cut,omitempty"`
	// Outcome is `ok`, `tool_error`, `restarting`, or the code of the refusal or
	// failure; Rule is what refused.
	Outcome string `json:"outcome"`
	Rule    string `json:"rule,omitempty"`
	Detail  string `json:"detail,omitempty"`
	// Held is the node that held the device, if that is not the one that writes.
	Held     string        `json:"held,omitempty"`
	Duration time.Duration `json:"duration_ns,omitempty"`
	// Count is how many entries this one stands for, where they were too many to
	// be written one by one.
	Count int64 `json:"count,omitempty"`
}
