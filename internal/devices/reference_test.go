package devices

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"testing"

	"fleetd/internal/goldentest"
)

// docs/reference/errors.md and events.md are what the program has.
func TestReference(t *testing.T) {
	var b bytes.Buffer
	b.WriteString("# Error codes\n\nGenerated from the program by `make reference`; do not edit.\n\n" +
		"Errors over REST are `application/problem+json` (RFC 9457) with a stable `code`; over NATS the same object is the reply.\n\n| code | HTTP status | meaning, and what to do |\n|---|---|---|\n")
	for _, c := range slices.SortedFunc(maps.Keys(codes), func(a, b Code) int {
		return cmp.Or(cmp.Compare(codes[a].status, codes[b].status), cmp.Compare(a, b))
	}) {
		fmt.Fprintf(&b, "| `%s` | %d %s | %s |\n", c, codes[c].status, codes[c].phrase, codes[c].meaning)
	}
	goldentest.Compare(t, "../../docs/reference/errors.md", b.Bytes())

	b.Reset()
	b.WriteString("# Events\n\nGenerated from the program by `make reference`; do not edit.\n\n" +
		"Types of `GET /v1/events`, and subjects on NATS (`--nats-prefix`). [events.md](../events.md) has the members that all share, examples, order and loss.\n\n" +
		"| type | subject | when | adds | kept |\n|---|---|---|---|---|\n")
	for _, k := range EventKinds {
		kept := "no"
		if k.Stored {
			kept = "yes"
		}
		subject := "devices.<d>." + string(k.Kind) + k.Suffix
		if token, ok := k.Kind.OfWebhook(); ok {
			subject = "webhooks.<w>." + token
		}
		if k.Kind.HasOwner() {
			subject = "jobs.<j>." + k.Kind.JobToken()
		}
		fmt.Fprintf(&b, "| `%s` | `fleetd.v1.%s` | %s | %s | %s |\n", k.Kind, subject, k.When, k.Adds, kept)
	}
	b.WriteString("| `audio` | `fleetd.v1.devices.<d>.audio` | the device sent audio: **one Opus packet, raw, no JSON**; headers as in [events.md](../events.md) | | no |\n")
	goldentest.Compare(t, "../../docs/reference/events.md", b.Bytes())
}
