package mcpserver

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/connlimit"
	"fleetd/internal/devicetest"
	"fleetd/internal/jsonspan"
)

// There is no authorization server, and a host that looks for one gets 404: after a 401
// it would try without end.
func TestNoAuthorizationServer(t *testing.T) {
	f := newFleet(t)
	for _, path := range []string{"/.well-known/oauth-authorization-server", "/.well-known/oauth-authorization-server/mcp", "/.well-known/openid-configuration",
		"/mcp/.well-known/openid-configuration", "/register", "/authorize", "/token"} {
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			for name, token := range map[string]string{"without a token": "", "with a wrong one": "wrong"} {
				if !Handles(path) {
					t.Errorf("%s is not handled", path)
				}
				// security: H1
				if a := f.send(t, method, path, token, ""); a.status != http.StatusNotFound || a.header.Get("WWW-Authenticate") != "" {
					t.Errorf("%s %s %s: %d %s", method, path, name, a.status, a.body)
				}
			}
		}
	}
}

// stream opens an event stream.
func (f *testFleet) stream(t testing.TB, method, path, body string, headers ...string) (status int, lines *bufio.Reader) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, method, f.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	headers = append(headers, "Authorization", "Bearer "+admin, "Accept", "application/json, text/event-stream", "Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := f.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	return response.StatusCode, bufio.NewReader(response.Body)
}

// until reads lines up to one with this prefix, and returns the rest of that line.
func until(t testing.TB, lines *bufio.Reader, beginning string) string {
	t.Helper()
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Errorf("no line has the prefix %q: %v", beginning, err)
			return ""
		}
		if rest, ok := strings.CutPrefix(line, beginning); ok {
			return strings.TrimSpace(rest)
		}
	}
}

// A client whose connection was lost resumes its stream while the node still has the
// old connection: the newer request gets the stream.
func TestStreamTakeOver(t *testing.T) {
	f := newFleet(t)
	script := devicetest.NewScript()
	script.Other = func(r devicetest.Request) string {
		if r.Method == "tools/call" {
			return "silent"
		}
		return ""
	}
	line := f.connect(t, lamp, script)
	init := strings.Replace(hello, "2025-06-18", "2025-11-25", 1)
	session := f.send(t, http.MethodPost, PathMCP, admin, init).header.Get("Mcp-Session-Id")
	in := []string{"Mcp-Session-Id", session, "Mcp-Protocol-Version", "2025-11-25"}
	f.send(t, http.MethodPost, PathMCP, admin, `{"jsonrpc":"2.0","method":"notifications/initialized"}`, in...)

	status, first := f.stream(t, http.MethodGet, PathMCP, "", in...)
	if status != http.StatusOK {
		t.Fatal(status)
	}
	if status, _ = f.stream(t, http.MethodGet, PathMCP, "", in...); status != http.StatusConflict {
		t.Errorf("another stream for unsolicited messages: %d", status)
	}
	if status, _ = f.stream(t, http.MethodGet, PathMCP, "", append(in, "Last-Event-ID", "_0")...); status != http.StatusOK {
		t.Errorf("the stream for unsolicited messages is resumed: %d", status)
	}
	for err := error(nil); err == nil; { // the first one ends
		_, err = first.ReadByte()
	}

	body := `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"call_device_tool","arguments":{"device":"` + string(lamp) + `","tool":"self.audio_speaker.set_volume","arguments":{"volume":5}}}}`
	_, post := f.stream(t, http.MethodPost, PathMCP, body, in...)
	id := until(t, post, "id: ")
	devicetest.Eventually(t, "the call is on the device", func() bool {
		got := line.Script.Received()
		return got[len(got)-1].Method == "tools/call"
	})
	answer := make(chan string, 1)
	go func() { // nothing arrives before the result of the call
		status, again := f.stream(t, http.MethodGet, PathMCP, "", append(in, "Last-Event-ID", id)...)
		if status != http.StatusOK {
			t.Errorf("resuming the stream of a call: %d", status)
		}
		answer <- until(t, again, "data: {")
	}()
	for err := error(nil); err == nil; { // the call's own request ends
		_, err = post.ReadByte()
	}
	got := line.Script.Received()
	call := got[len(got)-1]
	if err := line.Session.HandleControl([]byte(`{"session_id":"` + call.SessionID + `","type":"mcp","payload":{"jsonrpc":"2.0","id":` + string(call.ID) + `,` + devicetest.True + `}}`)); err != nil {
		t.Fatal(err)
	}
	if data := <-answer; !strings.Contains(data, `"is_error":false`) {
		t.Errorf("the answer is %s", data)
	}
}

// In every revision, an unknown method gets an error of the protocol, and a request
// without the session that it needs gets an error that names the header.
func TestMethodsOfOldRevisions(t *testing.T) {
	f := newFleet(t)
	for _, era := range eras[:3] {
		session := f.send(t, http.MethodPost, PathMCP, admin, strings.Replace(hello, "2025-06-18", era, 1)).header.Get("Mcp-Session-Id")
		in := []string{"Mcp-Session-Id", session, "Mcp-Protocol-Version", era}
		f.send(t, http.MethodPost, PathMCP, admin, `{"jsonrpc":"2.0","method":"notifications/initialized"}`, in...)
		a := f.send(t, http.MethodPost, PathMCP, admin, `{"jsonrpc":"2.0","id":"x","method":"tools/explode"}`, in...)
		var answer struct {
			ID    string
			Error struct{ Code int }
		}
		if err := json.Unmarshal([]byte(a.body), &answer); err != nil || a.status != http.StatusOK || answer.ID != "x" || answer.Error.Code != -32601 {
			t.Errorf("%s: %d %s", era, a.status, a.body)
		}
		if a := f.send(t, http.MethodPost, PathMCP, admin, `{"jsonrpc":"2.0","method":"notifications/explode"}`, in...); a.status != http.StatusAccepted && a.status != http.StatusBadRequest {
			t.Errorf("%s: a notification: %d %s", era, a.status, a.body)
		}
		a = f.send(t, http.MethodPost, PathMCP, admin, `{"jsonrpc":"2.0","id":3,"method":"tools/list"}`, "Mcp-Protocol-Version", era)
		if a.status != http.StatusBadRequest || !strings.Contains(a.body, "Mcp-Session-Id") || !json.Valid([]byte(a.body)) {
			t.Errorf("%s: without a session: %d %s", era, a.status, a.body)
		}
	}
	if n := f.mcp.Stats().Sessions.Load(); n != 3 {
		t.Errorf("%d sessions are counted", n)
	}
}

// The name of a tool is not evidence that it changes nothing.
func TestReadOnlyHints(t *testing.T) {
	f := newFleet(t)
	script := devicetest.NewScript()
	script.Tools = `[{"name":"self.get_device_status","description":"d","inputSchema":{"type":"object","properties":{}}},` +
		`{"name":"self.oven.get_hot","description":"d","inputSchema":{"type":"object","properties":{}}},` +
		`{"name":"self.get_system_info","description":"d","inputSchema":{"type":"object","properties":{"reset":{"type":"boolean"}}}}]`
	f.connect(t, lamp, script)
	s := f.host(t, PathDevices+string(lamp), "2025-11-25", admin, nil)
	list, err := s.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tool := range list.Tools {
		want := tool.Name == "get_device_status"
		// security: H12
		if reads := tool.Annotations != nil && tool.Annotations.ReadOnlyHint; reads != want {
			t.Errorf("%s: read-only %v", tool.Name, reads)
		}
	}
}

// On the server of one device the prompts concern that device.
func TestPromptsOfADevice(t *testing.T) {
	f := newFleet(t)
	f.connect(t, lamp, devicetest.NewScript())
	f.connect(t, robot, devicetest.NewScript())
	for _, era := range eras {
		s := f.host(t, PathDevices+string(lamp), era, admin, nil)
		if c := s.InitializeResult(); era != "2026-07-28" && c.Capabilities.Prompts == nil {
			t.Errorf("%s: no prompts are declared", era)
		}
		list, err := s.ListPrompts(t.Context(), nil)
		if err != nil || len(list.Prompts) != 3 || list.Prompts[0].Arguments[0].Required {
			t.Errorf("%s: %+v, %v", era, list, err)
		}
		for _, args := range []map[string]string{{}, {"device": string(lamp)}} {
			p, err := s.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: "diagnose_device", Arguments: args})
			if err != nil || !strings.Contains(p.Description, string(lamp)) {
				t.Errorf("%s: %+v, %v", era, p, err)
			}
		}
		if _, err := s.GetPrompt(t.Context(), &mcp.GetPromptParams{Name: "diagnose_device", Arguments: map[string]string{"device": string(robot)}}); err == nil {
			t.Errorf("%s: a prompt for another device is returned", era)
		}
	}
}

// Results of tools reach a host without characters that mislead terminals or readers,
// including errors and media types.
func TestAnswersAreClean(t *testing.T) {
	f := newFleet(t)
	script := devicetest.NewScript()
	const dirty = `red\u001b[31m \u001b]0;title\u0007 a\u0000b \u202egnp.exe\u202c \u2066x\u2069 \u200bz\u0085\u009b31m line\n\tnext 😀\udb40\udc41`
	const clean = "red  ab gnp.exe x z line\n\tnext 😀"
	script.Call = func(tool string, args json.RawMessage) string {
		switch string(args) {
		case `{"volume":1}`:
			return `"error":{"message":"` + dirty + `"}`
		case `{"volume":2}`:
			return `"result":{"content":[{"type":"image","data":"R0lGODlhAQABAAAAACw=","mimeType":"image/\u001b[2Jgif\u202e"},{"type":"strange\u202e","x":"` + dirty + `"}],"isError":false}`
		}
		return `"result":{"content":[{"type":"text","text":"` + dirty + `"}],"isError":false}`
	}
	script.Tools = `[` + devicetest.Volume + `,{"name":"self.get_device_status","description":"d","inputSchema":{"type":"object","properties":{}}}]`
	f.connect(t, lamp, script)
	for _, era := range eras {
		fleet, device := f.host(t, PathMCP, era, admin, nil), f.host(t, PathDevices+string(lamp), era, admin, nil)
		for volume := range 3 {
			args := map[string]any{"volume": volume}
			for name, r := range map[string]*mcp.CallToolResult{
				"fleet":  call(t, fleet, "call_device_tool", map[string]any{"device": string(lamp), "tool": "self.audio_speaker.set_volume", "arguments": args}),
				"many":   call(t, fleet, "call_many", map[string]any{"devices": []string{string(lamp)}, "tool": "self.audio_speaker.set_volume", "arguments": args}),
				"device": call(t, device, "audio_speaker_set_volume", args),
				"status": call(t, fleet, "get_device_status", map[string]any{"device": string(lamp)}),
			} {
				structure, err := json.Marshal(r.StructuredContent)
				if err != nil {
					t.Fatal(err)
				}
				var decoded any
				if err := json.Unmarshal(structure, &decoded); err != nil {
					t.Fatal(err)
				}
				texts := []string{textOf(r), flat(decoded)}
				for _, c := range r.Content {
					switch c := c.(type) {
					case *mcp.ImageContent:
						texts = append(texts, c.MIMEType)
						if c.MIMEType != "image/gif" {
							t.Errorf("%s, %s: an image of the type %q", era, name, c.MIMEType)
						}
					case *mcp.TextContent:
						if err := json.Unmarshal([]byte(c.Text), &decoded); err == nil {
							texts = append(texts, flat(decoded))
						}
					}
				}
				for _, text := range texts {
					// security: H13
					if strings.ContainsAny(text, "\x00\x07\x1b\u0085\u009b\u202e\u202c\u2066\u2069\u200b\U000e0041") || strings.Contains(text, "[31m") || strings.Contains(text, "title") {
						t.Errorf("%s, %s, %d: %q", era, name, volume, text)
					}
				}
				if name == "device" && volume < 2 && textOf(r) != clean {
					t.Errorf("%s, %d: %q, want %q", era, volume, textOf(r), clean)
				}
			}
		}
	}
}

// flat returns all texts of a JSON value, decoded.
func flat(v any) string {
	switch v := v.(type) {
	case string:
		return v
	case []any:
		var b strings.Builder
		for _, one := range v {
			b.WriteString(flat(one) + " ")
		}
		return b.String()
	case map[string]any:
		var b strings.Builder
		for key, one := range v {
			b.WriteString(key + " " + flat(one) + " ")
		}
		return b.String()
	}
	return ""
}

// Over the transport before Streamable HTTP, the error for an unknown method is sent on
// the stream, too.
func TestMethodsOverSSE(t *testing.T) {
	f := newFleet(t)
	_, lines := f.stream(t, http.MethodGet, PathSSE, "")
	path := until(t, lines, "data: ")
	if a := f.send(t, http.MethodPost, path, admin, hello); a.status != http.StatusAccepted {
		t.Fatalf("%d %s", a.status, a.body)
	}
	until(t, lines, "data: ")
	if a := f.send(t, http.MethodPost, path, admin, `{"jsonrpc":"2.0","id":"x","method":"tools/explode"}`); a.status != http.StatusAccepted {
		t.Errorf("%d %s", a.status, a.body)
		return
	}
	var answer struct {
		ID    string
		Error struct{ Code int }
	}
	if data := until(t, lines, "data: "); json.Unmarshal([]byte(data), &answer) != nil || answer.ID != "x" || answer.Error.Code != -32601 {
		t.Errorf("%s", data)
	}
}

// What is answered without a token has a rate on each connection.
func TestPathsWithoutATokenArePaced(t *testing.T) {
	f := newFleet(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: f.mcp, ConnContext: connlimit.WithConn}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(connlimit.NewLimiter(0, 0, nil).LimitCallers(l)) }) // ends with Close
	defer serving.Wait()
	defer func() { _ = server.Close() }()
	for name, request := range map[string]string{"metadata": "GET " + PathMetadata + " HTTP/1.1\r\nHost: localhost\r\n\r\n", "registration": "GET /register HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n",
		"another host": "GET /mcp HTTP/1.1\r\nHost: evil.example\r\n\r\n"} {
		const more = 10
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		go func() { _, _ = io.WriteString(c, strings.Repeat(request, connlimit.AnonymousBurst+more)) }()
		in := bufio.NewReader(c)
		for range connlimit.AnonymousBurst + more {
			answer, err := http.ReadResponse(in, nil)
			if err == nil {
				_, err = io.Copy(io.Discard, answer.Body)
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		// security: N42
		if took := time.Since(begun); took < (more-1)*time.Second/connlimit.AnonymousRate {
			t.Errorf("%s: %d requests over the burst are answered within %v", name, more, took)
		}
		_ = c.Close()
	}
}

// The number of messages in a batch is limited.
func TestBatchesAreBounded(t *testing.T) {
	f := newFleet(t)
	const era = "2025-03-26"
	session := f.send(t, http.MethodPost, PathMCP, admin, strings.Replace(hello, "2025-06-18", era, 1)).header.Get("Mcp-Session-Id")
	for n, refused := range map[int]bool{2: false, MaxBatch: false, MaxBatch + 1: true, 5000: true} {
		body := "\n [" + strings.TrimSuffix(strings.Repeat(`{"jsonrpc":"2.0","method":"notifications/initialized"},`, n), ",") + "]"
		if len(body) > BodyLimit {
			body = body[:BodyLimit]
		}
		a := f.send(t, http.MethodPost, PathMCP, admin, body, "Mcp-Session-Id", session, "Mcp-Protocol-Version", era)
		// security: H14
		if got := strings.Contains(a.body, "a batch has at most 100 messages"); got != refused || (a.status == http.StatusAccepted) == refused {
			t.Errorf("%d messages: %d %s", n, a.status, a.body)
		}
	}
	const message = `{"jsonrpc":"2.0","id":1,"method":"tools/list"},`
	many := strings.TrimSuffix(strings.Repeat(message, 2*MaxBatch), ",") + "]"
	deep := strings.Replace(message, `"tools/list"`, `"tools/list","params":`+strings.Repeat("[", jsonspan.MaxDepth)+strings.Repeat("]", jsonspan.MaxDepth), 1)
	for name, body := range map[string]string{"after white space": strings.Repeat(" ", 100) + "[" + many, "after a nested message": "[" + deep + many} {
		// security: H14
		if a := f.send(t, http.MethodPost, PathMCP, admin, body, "Mcp-Session-Id", session, "Mcp-Protocol-Version", era); !strings.Contains(a.body, "a batch has at most 100 messages") {
			t.Errorf("%s: %d %.200s", name, a.status, a.body)
		}
		// security: H14
		if a := f.send(t, http.MethodPost, PathMCP, admin, body, "Mcp-Protocol-Version", "2026-07-28"); !strings.Contains(a.body, "this revision has no batches") {
			t.Errorf("%s, without a session: %d %.200s", name, a.status, a.body)
		}
	}
	large := `  {"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"x":"` + strings.Repeat("x", connlimit.BodyWork) + `",` + benchMeta + `}}`
	if a := f.send(t, http.MethodPost, PathMCP, admin, large, "Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "tools/list"); a.status != http.StatusOK {
		t.Errorf("a large body: %d %s", a.status, a.body)
	}
}
