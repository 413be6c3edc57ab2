package restapi

import (
	"bytes"
	"encoding/json"
	"testing"

	"fleetd/internal/goldentest"
)

// docs/reference/openapi.json is what the program serves, so that a change of the
// API shows in a diff.
func TestReference(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.Version = "v1" })
	var out bytes.Buffer
	if err := json.Indent(&out, []byte(f.do(t, "GET", "/openapi.json", "").body), "", " "); err != nil {
		t.Fatal(err)
	}
	goldentest.Compare(t, "../../docs/reference/openapi.json", out.Bytes())
}
