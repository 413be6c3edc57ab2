package mcpserver

import (
	"encoding/json"
	"strings"
	"testing"
)

// A person sees all arguments of a call that the device will receive, without characters
// that are invisible or misleading.
func TestDisplayArguments(t *testing.T) {
	for arguments, want := range map[string]string{
		``: `{}`, `{}`: `{}`, ` {"a" : 1.50} `: `{"a":1.50}`, `{"\u0061":"\u0062<"}`: `{"a":"b<"}`, `{"a":"é"}`: `{"a":"é"}`,
		`{"note":"` + strings.Repeat("harmless ", 400) + `","danger":true}`: "", // its end would be cut off
		`{"a":"x\u200by"}`: "", `{"a":"\u202egnp"}`: "", `{"a":"x  y"}`: "", `{"a":1,"a":2}`: "", `{"a":{"x":1,"x":2}}`: "", `{"a":[{"x":1,"x":2}]}`: "", `{"a":{"x":[1,{"y":null}]}}`: `{"a":{"x":[1,{"y":null}]}}`, `{"a"`: "",
	} {
		got, ok := displayArguments(json.RawMessage(arguments))
		// security: H7
		if ok != (want != "") || ok && got != want {
			t.Errorf("%.60s is shown as %.60q, %t", arguments, got, ok)
		}
	}
}
