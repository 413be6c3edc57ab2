package mcpclient

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// scripted is a device made of a function: it gets each payload sent and
// returns the payloads (or, if they start with "!", whole broken envelopes) to
// hand back.
type scripted struct {
	client *Client
	reply  func(payload []byte) []string

	mu         sync.Mutex
	sent       [][]byte
	notes      []string
	deviations map[Deviation]int
}

func newScripted(reply func(payload []byte) []string) *scripted {
	s := &scripted{reply: reply, deviations: map[Deviation]int{}}
	s.client = New(s)
	return s
}

func (s *scripted) SendMCP(payload []byte) error {
	s.mu.Lock()
	s.sent = append(s.sent, bytes.Clone(payload))
	s.mu.Unlock()
	if s.reply == nil {
		return nil
	}
	for _, r := range s.reply(payload) {
		s.hand(r)
	}
	return nil
}

func (s *scripted) hand(r string) {
	if broken, ok := strings.CutPrefix(r, "!"); ok {
		s.client.HandleBroken([]byte(broken))
	} else {
		_ = s.client.Handle([]byte(r)) // unusable payloads are part of the script
	}
}

func (s *scripted) NotifyMCP(n Notification) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notes = append(s.notes, n.Method+" "+string(n.Params))
}

func (s *scripted) DeviateMCP(d Deviation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deviations[d]++
}

func (s *scripted) count(d Deviation) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.deviations[d]
}

type request struct {
	ID     json.RawMessage
	Method string
	Params json.RawMessage
}

func parse(t *testing.T, payload []byte) request {
	t.Helper()
	var r request
	if err := json.Unmarshal(payload, &r); err != nil {
		t.Fatalf("the client sends %s: %v", payload, err)
	}
	return r
}

func vector(t *testing.T, name string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "testdata", "vectors", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

type exchange struct {
	Note  string
	Sends string  `json:"server_sends"`
	Reply *string `json:"device_sends"`
	Valid bool    `json:"valid_json"`
}

var (
	idPattern     = regexp.MustCompile(`"id":-?\d+`)
	expandPattern = regexp.MustCompile(`\{\{(\w)\*(\d+)\}\}`)
)

// withID puts the id of the client's own request into a recorded message.
func withID(message string, id json.RawMessage) string {
	return idPattern.ReplaceAllString(message, `"id":`+string(id))
}

// payloadOf cuts the payload out of an envelope; a broken envelope stays whole.
func payloadOf(t *testing.T, envelope string, valid bool) string {
	t.Helper()
	if !valid {
		return "!" + envelope
	}
	var e struct{ Payload json.RawMessage }
	if err := json.Unmarshal([]byte(envelope), &e); err != nil {
		t.Fatal(err)
	}
	return string(e.Payload)
}

// call repeats a recorded request through the client's own methods.
func call(t *testing.T, c *Client, sends string) (Result, error) {
	t.Helper()
	var r request
	if err := json.Unmarshal([]byte(payloadOf(t, sends, true)), &r); err != nil {
		t.Fatal(err)
	}
	if r.Method != "tools/call" {
		raw, err := c.Request(t.Context(), r.Method, r.Params)
		return Result{Content: raw}, err
	}
	var p struct {
		Name      string
		Arguments json.RawMessage
	}
	if r.Params != nil {
		if err := json.Unmarshal(r.Params, &p); err != nil {
			t.Fatal(err)
		}
	}
	return c.CallTool(t.Context(), p.Name, p.Arguments, nil)
}

func TestCallVectors(t *testing.T) {
	var ok, failed struct{ Exchanges []exchange }
	vector(t, "mcp_call_ok", &ok)
	vector(t, "mcp_call_errors", &failed)
	if len(ok.Exchanges) < 8 || len(failed.Exchanges) < 13 {
		t.Fatal("vectors are missing")
	}
	for _, x := range append(ok.Exchanges, failed.Exchanges...) {
		s := newScripted(func(payload []byte) []string {
			r := parse(t, payload)
			return []string{payloadOf(t, withID(*x.Reply, r.ID), x.Valid)}
		})
		got, err := call(t, s.client, x.Sends)
		rpc := (*RPCError)(nil)
		switch {
		case strings.Contains(*x.Reply, `"error":`):
			_, want, _ := strings.Cut(*x.Reply, `"message":"`)
			want = strings.TrimSuffix(want, `"}}}`)
			if !errors.As(err, &rpc) || rpc.Message != want || rpc.Code != DefaultErrorCode {
				t.Errorf("%s: got %v, want the message %q", x.Note, err, want)
			}
		case err != nil:
			t.Errorf("%s: %v", x.Note, err)
		case strings.Contains(*x.Reply, `"image"`):
			if want := `[{"type":"image","mimeType":"image/png","data":"iVBORw=="}]`; string(got.Content) != want {
				t.Errorf("%s: got %s, want %s", x.Note, got.Content, want)
			}
		case !strings.Contains(*x.Reply, `"content":`+string(got.Content)+`,"isError":false`):
			t.Errorf("%s: got %s out of %s", x.Note, got.Content, *x.Reply)
		}
	}
}

func TestInitializeVector(t *testing.T) {
	var v struct{ Exchanges []exchange }
	vector(t, "mcp_initialize", &v)
	s := newScripted(func(payload []byte) []string {
		if r := parse(t, payload); r.ID != nil {
			return []string{payloadOf(t, withID(*v.Exchanges[0].Reply, r.ID), true)}
		}
		return nil
	})
	info, err := s.client.Initialize(t.Context(), InitParams{VisionURL: "http://192.0.2.5:8003/mcp/vision/explain", VisionToken: "vt-1", Version: "1"})
	if err != nil || info != (ServerInfo{Name: "bread-compact-wifi", Version: "2.4.2"}) {
		t.Errorf("%+v, %v", info, err)
	}
	want := strings.Replace(payloadOf(t, v.Exchanges[0].Sends, true), `"name":"fleet"`, `"name":"fleetd"`, 1)
	if got := withID(string(s.sent[0]), json.RawMessage("1")); got != want {
		t.Errorf("sent %s\nwant %s", got, want)
	}
	if got, want := string(s.sent[1]), payloadOf(t, v.Exchanges[2].Sends, true); got != want {
		t.Errorf("sent %s\nwant %s", got, want)
	}
}

func TestThreePagesVector(t *testing.T) {
	var v struct {
		Pages []struct {
			Sends string `json:"server_sends"`
			Short string `json:"device_sends_short"`
			SHA   string `json:"sha256"`
		}
	}
	vector(t, "mcp_tools_list_3pages", &v)
	at := 0
	var want []string
	s := newScripted(func(payload []byte) []string {
		page := v.Pages[at]
		at++
		full := expandPattern.ReplaceAllStringFunc(page.Short, func(m string) string {
			sub := expandPattern.FindStringSubmatch(m)
			n, _ := strconv.Atoi(sub[2])
			return strings.Repeat(sub[1], n)
		})
		if sum := sha256.Sum256([]byte(full)); hex.EncodeToString(sum[:]) != page.SHA {
			t.Fatalf("page %d expands wrongly", at)
		}
		var e struct {
			Payload struct {
				Result struct{ Tools []json.RawMessage }
			}
		}
		if err := json.Unmarshal([]byte(full), &e); err != nil {
			t.Fatal(err)
		}
		for _, tool := range e.Payload.Result.Tools {
			want = append(want, string(tool))
		}
		r := parse(t, payload)
		if got := withID(string(payload), json.RawMessage("1")); got != withID(payloadOf(t, page.Sends, true), json.RawMessage("1")) {
			t.Errorf("page %d: sent %s", at, payload)
		}
		return []string{payloadOf(t, withID(full, r.ID), true)}
	})
	list, err := s.client.ListTools(t.Context())
	if err != nil || list.Partial || list.Count != 14 || string(list.JSON) != "["+strings.Join(want, ",")+"]" {
		t.Errorf("%d tools, partial %v, %v", list.Count, list.Partial, err)
	}
}

func TestOutOfOrderVector(t *testing.T) {
	var v struct {
		Sends   []string `json:"server_sends_in_order"`
		Replies []string `json:"device_sends_in_order"`
	}
	vector(t, "mcp_out_of_order", &v)
	recorded := regexp.MustCompile(`"id":(\d+)`)
	ids := map[string]string{} // recorded id to the client's
	ready := make(chan struct{}, len(v.Sends))
	s := newScripted(nil)
	s.reply = func([]byte) []string { ready <- struct{}{}; return nil }
	results := make([]chan string, len(v.Sends))
	for i, sends := range v.Sends {
		results[i] = make(chan string, 1)
		go func() {
			r, err := call(t, s.client, sends)
			results[i] <- fmt.Sprint(string(r.Content), err)
		}()
		<-ready
		s.mu.Lock()
		ids[recorded.FindStringSubmatch(sends)[1]] = recorded.FindStringSubmatch(string(s.sent[i]))[1]
		s.mu.Unlock()
	}
	for _, reply := range v.Replies {
		id := recorded.FindStringSubmatch(reply)[1]
		s.hand(payloadOf(t, withID(reply, json.RawMessage(ids[id])), true))
	}
	for i, want := range []string{`"true"`, "Unknown tool: self.nope", "bread-compact-wifi", `"4"`} {
		if got := <-results[i]; !strings.Contains(got, want) {
			t.Errorf("request %d got %s, want %s", i, got, want)
		}
	}
}

// The client must never send what the device drops silently.
func TestNothingSentIsSilentlyDropped(t *testing.T) {
	s := newScripted(func(payload []byte) []string {
		r := parse(t, payload)
		if r.ID == nil {
			return nil
		}
		return []string{`{"jsonrpc":"2.0","id":` + string(r.ID) + `,"result":{"content":[],"tools":[]}}`}
	})
	c := s.client
	_, _ = c.Initialize(t.Context(), InitParams{})
	_, _ = c.ListTools(t.Context())
	_, _ = c.CallTool(t.Context(), "x", nil, nil)
	_, _ = c.Request(t.Context(), "prompts/list", nil)
	_ = c.Probe(t.Context())
	if len(s.sent) != 6 {
		t.Fatalf("%d messages sent", len(s.sent))
	}
	for _, payload := range s.sent {
		if r := parse(t, payload); dropped(payload) != (r.Method == "notifications/initialized") {
			t.Errorf("the device would drop %s", payload)
		}
	}
	// The rule itself finds every recorded request that is dropped.
	var v struct {
		Requests []struct {
			Reason string
			Sends  string `json:"server_sends"`
		}
	}
	vector(t, "mcp_silent_drops", &v)
	if len(v.Requests) < 11 {
		t.Fatal("vectors are missing")
	}
	for _, r := range v.Requests {
		if !dropped([]byte(payloadOf(t, r.Sends, true))) {
			t.Errorf("%s: %s counts as answered", r.Reason, r.Sends)
		}
	}
}

// dropped is the firmware's rule for requests it never answers
// (mcp_server.cc:350-382).
func dropped(payload []byte) bool {
	var r struct {
		JSONRPC, Method, ID, Params json.RawMessage
	}
	if json.Unmarshal(payload, &r) != nil || string(r.JSONRPC) != `"2.0"` || len(r.Method) == 0 || r.Method[0] != '"' {
		return true
	}
	if bytes.HasPrefix(r.Method, []byte(`"notifications`)) || r.Params != nil && r.Params[0] != '{' {
		return true
	}
	n, err := strconv.ParseInt(string(r.ID), 10, 32)
	return err != nil || n < 1
}

// Ids come back as the firmware's C ints; those that fit find their request.
func TestIDVectors(t *testing.T) {
	var v struct {
		Cases []struct {
			Request string `json:"request_id"`
			Reply   int64  `json:"reply_id"`
		}
	}
	vector(t, "mcp_ids", &v)
	for _, c := range v.Cases {
		s := newScripted(func([]byte) []string {
			return []string{fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"result":{}}`, c.Reply)}
		})
		id, err := strconv.ParseInt(c.Request, 10, 32)
		if err != nil || id < 1 {
			if err := s.client.Handle(fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%d,"result":{}}`, c.Reply)); err != nil || s.count(DeviationForeignReply) != 1 {
				t.Errorf("reply id %d matches something: %v", c.Reply, s.deviations)
			}
			continue // never sent by us
		}
		s.client.nextID = int32(id)
		if _, err := s.client.Request(t.Context(), "x", nil); err != nil {
			t.Errorf("id %d: %v", id, err)
		}
	}
}

func TestListEdgeVectors(t *testing.T) {
	var v struct{ Exchanges []exchange }
	vector(t, "mcp_tools_list_edge", &v)
	for _, x := range v.Exchanges {
		s := newScripted(func(payload []byte) []string {
			return []string{payloadOf(t, withID(*x.Reply, parse(t, payload).ID), x.Valid)}
		})
		_, err := call(t, s.client, x.Sends)
		rpc := (*RPCError)(nil)
		if failed := strings.Contains(*x.Reply, `"error"`); failed != errors.As(err, &rpc) || failed && oversizeTool(rpc.Message) != unnamed {
			t.Errorf("%s: %v", x.Note, err)
		}
	}
}

func TestIDsStayInt32AcrossTheWrap(t *testing.T) {
	s := newScripted(nil)
	s.reply = func(payload []byte) []string {
		return []string{`{"jsonrpc":"2.0","id":` + string(parse(t, payload).ID) + `,"result":{}}`}
	}
	s.client.nextID = maxID - 1
	for _, want := range []string{"2147483646", "2147483647", "1"} {
		if _, err := s.client.Request(t.Context(), "x", nil); err != nil {
			t.Fatal(err)
		}
		if got := string(parse(t, s.sent[len(s.sent)-1]).ID); got != want {
			t.Errorf("id %s, want %s", got, want)
		}
	}
	if !s.client.used(maxID) || s.client.used(2) {
		t.Error("used does not follow the wrap")
	}
}

func TestListGuards(t *testing.T) {
	tool := func(name string) string {
		return `{"name":"` + name + `","inputSchema":{"type":"object","properties":{}}}`
	}
	page := func(next string, tools ...string) string {
		text := `"result":{"tools":[` + strings.Join(tools, ",") + `]`
		if next != "" {
			text += `,"nextCursor":"` + next + `"`
		}
		return text + "}"
	}
	fails := func(message string) string { return `"error":{"message":"` + message + `"}` }
	for _, c := range []struct {
		name      string
		pages     func(cursor string, n int) string
		count     int
		partial   bool
		requests  int
		deviation Deviation
	}{
		{"endless cursor", func(string, int) string { return page("b", tool("a")) }, 2, true, 2, DeviationCursorLoop},
		{"new cursor on each page", func(_ string, n int) string { return page(strconv.Itoa(n), tool("a")) }, MaxPages, true, MaxPages, DeviationListTooLong},
		{"oversize tool", func(cursor string, _ int) string {
			if cursor == "" {
				return page("big", tool("a"))
			}
			return fails("Failed to add tool big because of payload size limit")
		}, 1, true, 2, DeviationOversizeTool},
		{"cursor refused once", func(cursor string, n int) string {
			switch {
			case cursor == "":
				return page("b", tool("a"))
			case n == 2:
				return fails("Failed to add tool  because of payload size limit")
			}
			return page("", tool("b"))
		}, 2, false, 4, DeviationCursorRefused},
		{"cursor refused always", func(cursor string, n int) string {
			if cursor == "" {
				return page("b", tool("a"))
			}
			return fails("Failed to add tool  because of payload size limit")
		}, 1, true, 4, DeviationCursorRefused},
		{"five megabytes", func(_ string, n int) string {
			return page(strconv.Itoa(n), `{"name":"x","description":"`+strings.Repeat("y", 50_000)+`"}`)
		}, MaxListBytes / 50_000, true, MaxListBytes/50_000 + 1, DeviationListTooLong},
		{"no tools in it", func(string, int) string { return page("", `1`, `{}`, `{"name":""}`, tool("a")) }, 1, true, 1, DeviationBadTool},
	} {
		n := 0
		s := newScripted(func(payload []byte) []string {
			n++
			r := parse(t, payload)
			var p struct{ Cursor string }
			if err := json.Unmarshal(r.Params, &p); err != nil {
				t.Fatal(err)
			}
			return []string{`{"jsonrpc":"2.0","id":` + string(r.ID) + `,` + c.pages(p.Cursor, n) + `}`}
		})
		list, err := s.client.ListTools(t.Context())
		if err != nil || list.Count != c.count || list.Partial != c.partial || n != c.requests || s.count(c.deviation) == 0 || !json.Valid(list.JSON) {
			t.Errorf("%s: %d tools, partial %v (%s), %d requests, deviations %v, %v", c.name, list.Count, list.Partial, list.Reason, n, s.deviations, err)
		}
		if list.Partial && list.Reason == "" {
			t.Errorf("%s: no reason given", c.name)
		}
	}
	for name, first := range map[string]string{"first page fails": fails("boom"), "no array": `"result":{"tools":{}}`, "empty name on first page": fails("Failed to add tool  because of payload size limit")} {
		s := newScripted(func(payload []byte) []string {
			return []string{`{"jsonrpc":"2.0","id":` + string(parse(t, payload).ID) + `,` + first + `}`}
		})
		if list, err := s.client.ListTools(t.Context()); err == nil {
			t.Errorf("%s: %+v", name, list)
		}
	}
}
