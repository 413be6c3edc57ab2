package mcpserver

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
)

func TestCleanSchema(t *testing.T) {
	deep := strings.Repeat(`{"properties":{"a":`, 6) + `{}` + strings.Repeat(`}}`, 6)
	many := `{"type":"object","properties":{"a":{}` + strings.Repeat(`,"b":{}`, 1) + `}}`
	wide := `{"type":"object","properties":{`
	for i := range maxMembers + 1 {
		if i > 0 {
			wide += ","
		}
		wide += `"p` + strings.Repeat("x", i) + `":{}`
	}
	for name, c := range map[string]struct{ in, out string }{
		"stock":     {`{"type":"object","properties":{"volume":{"type":"integer","minimum":0,"maximum":100}},"required":["volume"]}`, ""},
		"none":      {``, anySchema},
		"two":       {many, ""},
		"ref":       {`{"type":"object","properties":{"a":{"$ref":"file:///etc/passwd"}}}`, anySchema},
		"defs":      {`{"type":"object","$defs":{}}`, anySchema},
		"dynamic":   {`{"type":"object","properties":{"a":{"\u0024ref":"http://a/"}}}`, anySchema},
		"deep":      {deep, anySchema},
		"wide":      {wide + `}}`, anySchema},
		"large":     {`{"type":"object","description":"` + strings.Repeat("x", maxSchema) + `"}`, anySchema},
		"array":     {`[]`, anySchema},
		"no object": {`{"type":"string"}`, anySchema},
		"twice":     {`{"type":"object","type":"string"}`, anySchema},
		"header":    {`{"type":"object","properties":{"a":{"type":"string","x-mcp-header":"Authorization"}}}`, `{"type":"object","properties":{"a":{"type":"string"}}}`},
		"words":     {"{\"type\":\"object\",\"description\":\"a\u202eb\"}", `{"type":"object","description":"ab"}`},
		"key":       {"{\"type\":\"object\",\"properties\":{\"a\u200b\":{}}}", anySchema},
		"broken":    {`{"type":"object"`, anySchema},
	} {
		want := c.out
		if want == "" {
			want = c.in
		}
		got, note := cleanSchema([]byte(c.in))
		// security: H5
		if string(got) != want || (note != "") != (want == anySchema && c.in != "") {
			t.Errorf("%s: %s (%s)", name, got, note)
		}
	}
}

var validHostName = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,39}$`)

func TestHostNames(t *testing.T) {
	long := "self." + strings.Repeat("long_", 12)
	got := hostNames([]string{"self.audio_speaker.set_volume", "self.get_device_status", "音量", "", "self.A.b", "self.a.b", "self.a_b", long, long + "x", "9lives", "a b", "SELF.x"})
	seen := map[string]bool{}
	for _, name := range got {
		if !validHostName.MatchString(name) || seen[name] {
			t.Errorf("%q in %q", name, got)
		}
		seen[name] = true
	}
	if got[0] != "audio_speaker_set_volume" || got[1] != "get_device_status" || got[9] != "t_9lives" || got[4] == "a_b" {
		t.Errorf("%q", got)
	}
}

func FuzzCleanSchema(f *testing.F) {
	f.Add([]byte(`{"type":"object","properties":{"a":{"type":"string","enum":["x"]}},"required":["a"]}`))
	f.Add([]byte(`{"type":"object","properties":{"a":{"$ref":"#"}}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if !json.Valid(raw) { // catalogs hold JSON
			return
		}
		got, _ := cleanSchema(raw)
		var schema map[string]any
		if err := json.Unmarshal(got, &schema); err != nil || schema["type"] != "object" || len(got) > 6*maxSchema {
			t.Fatalf("%s: %v", got, err)
		}
		if strings.Contains(string(got), `"$ref"`) {
			if again, note := cleanSchema(got); note == "" { // "$ref" may occur in a text
				t.Logf("%s", again)
			} else {
				t.Fatalf("%s", got)
			}
		}
	})
}

func FuzzHostNames(f *testing.F) {
	f.Add("self.a.b", "self.a_b", "a-b")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		if a == b || b == c || a == c {
			return
		}
		names := hostNames([]string{a, b, c})
		for i, name := range names {
			if !validHostName.MatchString(name) {
				t.Fatalf("%q", name)
			}
			if name == names[(i+1)%3] {
				t.Fatalf("%q", names)
			}
		}
	})
}
