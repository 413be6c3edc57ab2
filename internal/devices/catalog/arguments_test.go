package catalog

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"fleetd/internal/devices"
)

func tool(t testing.TB, schema string) *Tool {
	t.Helper()
	c, err := New([]byte(`[{"name":"t","inputSchema":` + schema + `}]`))
	if err != nil {
		t.Fatal(err)
	}
	return c.Tool("t")
}

const otto = `{"type":"object","properties":{"action":{"type":"string","default":"sit"},"steps":{"type":"integer","default":3,"minimum":1,"maximum":100},"on":{"type":"boolean"}},"required":["on"]}`

func TestArguments(t *testing.T) {
	nested := `{"type":"object","properties":{"list":{"type":"array","items":{"type":"integer"}},"mode":{"enum":["a","b"]}},"required":["mode"]}`
	for _, c := range []struct {
		schema, args string
		pointers     string
	}{
		{otto, `{"on":true}`, ""}, {otto, `{"on":false,"steps":100,"action":"x","extra":1}`, ""},
		{otto, ``, "/on"}, {otto, `{"ON":true}`, "/ON /on"}, {otto, `{"ON":false,"on":true}`, "/ON"}, {nested, `{"Mode":"b","mode":"a"}`, "/Mode"}, {otto, `{"on":1}`, "/on"}, {otto, `{"on":true,"steps":0}`, "/steps"},
		{otto, `{"on":"yes","steps":101,"action":5}`, "/on /steps /action"}, {otto, `{"on":true,"steps":3.0}`, ""},
		{otto, `{"on":true,"steps":1.5}`, "/steps"}, {`{"type":"object","properties":{"n":{"type":"integer"}}}`, `{"n":2147483648}`, "/n"},
		{nested, `{"mode":"a","list":[1,2]}`, ""}, {nested, `{"mode":"c","list":[1,"x"]}`, "/list/1 /mode"}, {nested, `{}`, ""},
		{`{"type":"object","properties":{"a/b~c":{"type":"string"}},"required":["a/b~c"]}`, `{}`, "/a~1b~0c"},
		{`{}`, `{"any":1}`, ""}, {`"nonsense"`, `{"any":1}`, ""}, {`{"$ref":"file:///etc/passwd"}`, `{}`, ""},
		{`{"type":"object","properties":{"x":{"$ref":"http://192.0.2.1/s"}}}`, `{"x":1}`, ""},
	} {
		err := tool(t, c.schema).CheckCall(json.RawMessage(c.args))
		if c.schema == nested && c.args == `{}` {
			if err == nil || len(err.Faults) != 1 || !strings.Contains(err.Faults[0].Detail, "mode") {
				t.Errorf("missing property: %+v", err)
			}
			continue
		}
		var got []string
		if err != nil {
			for _, f := range err.Faults {
				got = append(got, f.Pointer)
				if f.Detail == "" {
					t.Errorf("%s: no detail", c.args)
				}
			}
		}
		want := strings.Fields(c.pointers)
		// security: K4
		if len(got) != len(want) {
			t.Errorf("%s: faults %v, want %v", c.args, got, want)
			continue
		}
		for _, w := range want {
			if !strings.Contains(" "+strings.Join(got, " ")+" ", " "+w+" ") {
				t.Errorf("%s: faults %v, want %v", c.args, got, want)
			}
		}
	}
	if err := tool(t, otto).CheckCall(json.RawMessage(`[1]`)); err == nil || err.Code != devices.CodeBadRequest {
		t.Errorf("array: %v", err)
	}
}

// A schema cannot make fleetd read a file or send a request: the file here would make the
// arguments invalid, and the server counts requests.
func TestSchemasReadNothing(t *testing.T) {
	var asked atomic.Int32
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		_, _ = io.WriteString(w, "{}")
	}))
	defer web.Close()
	file := filepath.Join(t.TempDir(), "schema.json")
	if err := os.WriteFile(file, []byte(`{"$schema":"https://json-schema.org/draft/2020-12/schema","required":["never"]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{"file://" + file, web.URL} {
		for _, form := range []string{`{"$ref":%q}`, `{"$dynamicRef":%q}`, `{"properties":{"x":{"$ref":%q}}}`, `{"allOf":[{"$ref":%q}]}`,
			`{"$schema":%q,"required":["never"],"not":{"required":["never"]}}`} {
			// security: D12
			if err := tool(t, fmt.Sprintf(form, url)).CheckCall(json.RawMessage(`{"x":{}}`)); err != nil {
				t.Errorf(form+": %v", url, err)
			}
		}
	}
	// security: D12
	if n := asked.Load(); n != 0 {
		t.Errorf("a schema made fleetd send %d requests", n)
	}
}

// Costly schemas of a device are left to the device, and costly numbers in arguments are
// refused.
func TestCostlySchemas(t *testing.T) {
	defs := ""
	for i := range 32 {
		defs += fmt.Sprintf(`"d%d":{"allOf":[{"$ref":"#/$defs/d%d"},{"$ref":"#/$defs/d%d"}]},`, i, i+1, i+1)
	}
	for name, schema := range map[string]string{
		"tiny multiple": `{"properties":{"a":{"multipleOf":1e-9999999}}}`,
		"bomb":          `{"$ref":"#/$defs/d0","$defs":{` + defs + `"d32":{}}}`,
		"pattern":       `{"properties":{"a":{"pattern":"` + strings.Repeat("(.?){999}", 400) + `"}}}`,
		"long":          `{"anyOf":[` + strings.Repeat(`{"const":1},`, 2000) + `{}]}`,
		"huge minimum":  `{"properties":{"a":{"type":"number","minimum":1e99999999999}}}`,
		"many required": `{"properties":{},"required":[` + strings.Repeat(`"x",`, 20000) + `"x"]}`,
	} {
		if err := tool(t, schema).CheckCall(json.RawMessage(`{"a":5}`)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	number := tool(t, `{"type":"object","properties":{"a":{"type":"number","minimum":1}}}`)
	for args, bad := range map[string]bool{`{"a":1e99999999999}`: true, `{"a":` + strings.Repeat("9", 1000) + `}`: true, `{"a":1.5e3}`: false, `{"a":0.5}`: true} {
		if err := number.CheckCall(json.RawMessage(args)); (err != nil) != bad {
			t.Errorf("%.30s: %v", args, err)
		}
	}
	many := tool(t, `{"type":"object","properties":{"l":{"type":"array","items":{"type":"boolean"}}}}`)
	err := many.CheckCall(json.RawMessage(`{"l":[` + strings.Repeat(`"`+strings.Repeat("x", 500)+`",`, 100) + `1]}`))
	if err == nil || len(err.Faults) > maxFaults || len(err.Faults[0].Detail) > maxFaultDetail+8 {
		t.Errorf("%d faults", len(err.Faults))
	}
	if err := tool(t, `null`).CheckCall(json.RawMessage(`[1]`)); err == nil || err.Code != devices.CodeBadRequest {
		t.Errorf("an array as arguments: %v", err)
	}
}

func TestCheckDoesNotAllocate(t *testing.T) {
	s := tool(t, otto)
	args := json.RawMessage(`{"on":true,"steps":5}`)
	if got := testing.AllocsPerRun(100, func() {
		if s.CheckCall(args) != nil {
			t.Fatal("refused")
		}
	}); got != 0 {
		t.Errorf("%v allocations per check", got)
	}
}
