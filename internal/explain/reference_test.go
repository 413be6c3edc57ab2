package explain

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"fleetd/internal/api"
	"fleetd/internal/goldentest"
)

// docs/reference/causes.md is the list of causes.
func TestReference(t *testing.T) {
	var b bytes.Buffer
	b.WriteString("# Causes\n\nGenerated from the program by `make reference`; do not edit.\n\n" +
		"What `fleetd explain` and `GET /v1/devices/{device}/explain` answer with: the first cause whose rule fits. Further causes may be added.\n\n" +
		"| cause | of | meaning | what to do |\n|---|---|---|---|\n")
	for _, info := range Causes {
		about := string(info.About)
		if about == "" {
			about = "any"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", info.Cause, about, info.Meaning, strings.Join(info.Next, "<br>"))
	}
	goldentest.Compare(t, "../../docs/reference/causes.md", b.Bytes())
}

// The API's description has all causes.
func TestCausesOfAPI(t *testing.T) {
	field, _ := reflect.TypeFor[api.Why]().FieldByName("Cause")
	listed := map[string]bool{}
	for _, name := range strings.Split(field.Tag.Get("enum"), ",") {
		listed[name] = true
	}
	for _, info := range Causes {
		if !listed[string(info.Cause)] {
			t.Errorf("the API's list lacks %s", info.Cause)
		}
	}
	if len(listed) != len(Causes) {
		t.Errorf("the API lists %d causes, there are %d", len(listed), len(Causes))
	}
}
