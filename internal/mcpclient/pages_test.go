package mcpclient

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"fleetd/internal/envelope"
)

// page is the text of a result with some tools, over minKnownPage bytes.
func page(of string, tools int, next string) string {
	var list []string
	for i := range tools {
		list = append(list, fmt.Sprintf(`{"name":"self.%s.%d","description":"%s","inputSchema":{"type":"object"}}`, of, i, strings.Repeat("long ", 40)))
	}
	text := `{"tools":[` + strings.Join(list, ",") + `]`
	if next != "" {
		text += `,"nextCursor":"` + next + `"`
	}
	return text + `}`
}

// listing is a device with these pages, whose envelopes go through HandleKnown first,
// as a session has them.
func listing(t *testing.T, envelope string, pages ...string) (s *scripted, fast *int) {
	t.Helper()
	fast = new(int)
	s = newScripted(nil)
	at := 0
	s.reply = func(payload []byte) []string {
		r := parse(t, payload)
		if r.Method != "tools/list" {
			return nil
		}
		text := pages[at%len(pages)]
		at++
		if s.client.HandleKnown(fmt.Appendf(nil, envelope, r.ID, text)) {
			*fast++
			return nil
		}
		return []string{fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":%s}`, r.ID, text)}
	}
	return s, fast
}

const stock = `{"session_id":"abcdefghijklmnop","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"result":%s}}`

// What a second device lists is the same whether its pages were read or known, and a
// page is read once.
func TestKnownPages(t *testing.T) {
	t.Parallel()
	pages := []string{page("known", 5, "self.known.5"), page("known.more", 7, "x"), page("known.last", 3, "")}
	var lists []string
	for i, want := range []int{0, 3, 3} {
		s, fast := listing(t, stock, pages...)
		list, err := s.client.ListTools(t.Context())
		if err != nil || list.Partial || list.Count != 15 || *fast != want {
			t.Fatalf("device %d: %+v, %v; %d pages known, want %d", i, list, err, *fast, want)
		}
		if !json.Valid(list.JSON) || len(s.deviations) != 0 {
			t.Errorf("device %d: %.80s, %v", i, list.JSON, s.deviations)
		}
		lists = append(lists, string(list.JSON))
		list.Release()
	}
	if lists[0] != lists[1] || lists[0] != lists[2] {
		t.Error("the lists differ")
	}
}

// A raw request gets a copy: its caller may change it.
func TestKnownPageIsNotLent(t *testing.T) {
	t.Parallel()
	text := page("lent", 4, "")
	s, fast := listing(t, stock, text)
	list, err := s.client.ListTools(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	list.Release()
	for range 2 {
		result, err := s.client.Request(t.Context(), "tools/list", nil)
		if err != nil || string(result) != text {
			t.Fatalf("%.80s, %v", result, err)
		}
		clear(result)
	}
	if *fast != 2 {
		t.Errorf("%d pages were known", *fast)
	}
}

// A page with an element that is not a tool is read each time, to count each device. One
// that does not fit into the list is cut as usual.
func TestPagesThatAreNotKnown(t *testing.T) {
	t.Parallel()
	bad := strings.Replace(page("bad", 4, ""), `"tools":[`, `"tools":[17,`, 1)
	for range 2 {
		s, fast := listing(t, stock, bad)
		list, err := s.client.ListTools(t.Context())
		if err != nil || !list.Partial || list.Count != 4 || *fast != 0 || s.count(DeviationBadTool) != 1 {
			t.Errorf("%+v, %v, %d known, %v", list, err, *fast, s.deviations)
		}
	}
	full := ToolList{Count: MaxTools - 1}
	if full.addPage(&knownPage{tools: []byte("{},{}"), count: 2}) || full.Count != MaxTools-1 || len(full.JSON) != 0 {
		t.Error("a page was added over the limit")
	}
}

// Pages of hostile devices take no more than their room.
func TestKnownPagesAreBounded(t *testing.T) {
	t.Parallel()
	k := knownPages{seed: known.seed, pages: map[uint64]*knownPage{}}
	for i := range 3 * maxKnownPages {
		k.add([]byte(page(fmt.Sprint(i), 4, "")), nil, 4, "")
	}
	k.add(make([]byte, pageSize), nil, 1, "")
	k.add(make([]byte, minKnownPage-1), nil, 1, "")
	if len(k.pages) != maxKnownPages {
		t.Errorf("%d pages are kept", len(k.pages))
	}
	if last := k.find([]byte(page(fmt.Sprint(3*maxKnownPages-1), 4, ""))); last == nil {
		t.Error("the latest is not among them")
	}
}

// Nothing is taken from an envelope that is put together in another way: it is read.
func TestOtherEnvelopesAreRead(t *testing.T) {
	t.Parallel()
	text := page("other", 4, "")
	s, _ := listing(t, stock, text)
	list, err := s.client.ListTools(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	list.Release()
	for _, other := range []string{
		`{"type":"mcp","session_id":"a","payload":{"jsonrpc":"2.0","id":%s,"result":%s}}`,
		`{"session_id":"a\n","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"result":%s}}`,
		"{\"session_id\":\"a\xff\",\"type\":\"mcp\",\"payload\":{\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":%s}}",
		`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"1.0","id":%s,"result":%s}}`,
		`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","id":0%s,"result":%s}}`,
		`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","id":"%s","result":%s}}`,
		`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","id":%s.0,"result":%s}}`,
		`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","id":99999%s,"result":%s}}`,
		`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"result": %s}}`,
		`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"result":%s,"x":1}}`,
		`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"result":%s}} `,
		`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"result":%s}`,
	} {
		if s.client.HandleKnown(fmt.Appendf(nil, other, "1234567", text)) {
			t.Errorf("taken: %s", other)
		}
	}
	if !s.client.HandleKnown(fmt.Appendf(nil, stock, "1", text)) || s.count(DeviationForeignReply) != 1 {
		t.Error("an answer to nothing that was asked is counted")
	}
}

// What is cut out of an answer is what reading it gives.
func FuzzCutAnswer(f *testing.F) {
	f.Add(fmt.Appendf(nil, stock, "41", `{"tools":[]}`))
	f.Add([]byte(`{"session_id":"","type":"mcp","payload":{"jsonrpc":"2.0","id":2147483648,"result":1}}`))
	f.Add([]byte(`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","id":1,"result":{"a":1},"result":{"b":2}}}`))
	f.Add([]byte("{\"session_id\":\"\",\"type\":\"mcp\",\"payload\":{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"\xe1\":[]}}}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		id, result, ok := cutAnswer(data)
		if !ok || !json.Valid(result) || !utf8.Valid(result) { // only results that were read are known
			return
		}
		e, err := envelope.Parse(data)
		if err != nil || string(e.Type) != envelope.TypeMCP {
			t.Fatalf("%q is not an envelope: %v", data, err)
		}
		var m message
		if err := m.parse(e.Payload); err != nil {
			t.Fatal(err)
		}
		if string(m.id) != fmt.Sprint(id) || !m.version || m.method != nil || m.err != nil || !bytes.Equal(m.result, bytes.TrimSpace(result)) {
			t.Errorf("%q: id %s and %d, result %q and %q", data, m.id, id, m.result, result)
		}
	})
}
