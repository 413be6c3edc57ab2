package mcpclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Of an error the first code and message count; of one that breaks the envelope
// its text does to the end, whatever it quotes.
func TestErrorsOfDevices(t *testing.T) {
	for reply, want := range map[string]string{
		`{"jsonrpc":"2.0","id":%s,"error":{"code":-5,"message":"first","code":-6,"message":"second"}}`:            "device answers error -5: first",
		`!{"session_id":"s","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,"error":{"message":"not "}}} but"}}}`: `device answers error -32000: not "}}} but`,
	} {
		s := newScripted(nil)
		s.reply = func(payload []byte) []string { return []string{fmt.Sprintf(reply, parse(t, payload).ID)} }
		if _, err := s.client.Request(t.Context(), "x", nil); err == nil || err.Error() != want {
			t.Errorf("%s: %v", reply, err)
		}
	}
}

// Requests may come from any number of goroutines.
func TestConcurrentRequests(t *testing.T) {
	s := newScripted(nil)
	s.reply = func(payload []byte) []string {
		id := string(parse(t, payload).ID)
		return []string{`{"jsonrpc":"2.0","id":` + id + `,"result":{"of":` + id + `}}`}
	}
	var all sync.WaitGroup
	answers := make(chan string, 8*50)
	for range 8 {
		all.Go(func() {
			for range 50 {
				result, err := s.client.Request(t.Context(), "x", nil)
				if err != nil {
					t.Error(err)
				}
				answers <- string(result)
			}
		})
	}
	all.Wait()
	close(answers)
	seen := map[string]bool{}
	for a := range answers {
		if seen[a] {
			t.Errorf("%s came twice", a)
		}
		seen[a] = true
	}
}

func TestStrayAndOddReplies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScripted(nil)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if _, err := s.client.Request(ctx, "slow", nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got %v", err)
		}
		id := string(parse(t, s.sent[0]).ID)
		s.hand(`{"jsonrpc":"2.0","id":` + id + `,"result":{}}`)
		if s.count(DeviationLateReply) != 1 {
			t.Error("the late reply is not counted")
		}
		s.hand(`{"jsonrpc":"2.0","id":2147483000,"result":{}}`)
		s.hand(`{"jsonrpc":"2.0","id":-5,"result":{}}`)
		if s.count(DeviationForeignReply) != 2 {
			t.Errorf("%d foreign replies counted, want 2", s.count(DeviationForeignReply))
		}
		s.reply = func(payload []byte) []string { // cut to 32 bits the first is the id, too
			id := string(parse(t, payload).ID)
			n, err := strconv.ParseInt(id, 10, 64)
			if err != nil {
				t.Error(err)
			}
			return []string{fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"result":{"foreign":true}}`, n+1<<32), `{"jsonrpc":"2.0","id":` + id + `,"result":{},"result":{"second":true},"id":7}`}
		}
		if result, err := s.client.Request(t.Context(), "x", nil); err != nil || string(result) != "{}" || s.count(DeviationForeignReply) != 3 {
			t.Errorf("after a foreign one: %s, %v", result, err)
		}
		for _, form := range []string{`"%s"`, `%s.0`} {
			s.reply = func(payload []byte) []string {
				return []string{`{"jsonrpc":"2.0","id":` + fmt.Sprintf(form, parse(t, payload).ID) + `,"result":{}}`}
			}
			if _, err := s.client.Request(t.Context(), "x", nil); err != nil {
				t.Errorf("id as %s: %v", form, err)
			}
		}
		if s.count(DeviationIDType) != 2 {
			t.Error("odd ids are not counted")
		}
		s.reply = func(payload []byte) []string { // answers twice
			r := `{"jsonrpc":"2.0","id":` + string(parse(t, payload).ID) + `,"result":{}}`
			return []string{r, r}
		}
		if _, err := s.client.Request(t.Context(), "x", nil); err != nil || s.count(DeviationLateReply) != 2 {
			t.Errorf("second answer: %v, late %d", err, s.count(DeviationLateReply))
		}
	})
}

func TestAnswerWithNeitherResultNorError(t *testing.T) {
	s := newScripted(func(payload []byte) []string {
		return []string{`{"jsonrpc":"2.0","id":` + string(parse(t, payload).ID) + `,"error":null}`}
	})
	if _, err := s.client.Request(t.Context(), "x", nil); !errors.Is(err, ErrMalformed) {
		t.Errorf("%v", err)
	}
}

func TestCloseFailsPending(t *testing.T) {
	s := newScripted(nil)
	cause := errors.New("superseded")
	s.reply = func([]byte) []string { s.client.Close(cause); return nil }
	_, err := s.client.Request(t.Context(), "x", nil)
	if !errors.Is(err, ErrClosed) || !errors.Is(err, cause) || errors.Is(err, ErrNotSent) {
		t.Errorf("pending: %v", err)
	}
	if _, err = s.client.Request(t.Context(), "x", nil); !errors.Is(err, ErrNotSent) || !errors.Is(err, cause) {
		t.Errorf("afterwards: %v", err)
	}
	s.client.Close(errors.New("again"))
}

func TestCallAllocations(t *testing.T) {
	var c *Client
	p := &echoPeer{}
	c = New(p)
	p.client = c
	args := json.RawMessage(`{"volume":50}`)
	ctx := t.Context()
	got := testing.AllocsPerRun(200, func() {
		if _, err := c.CallTool(ctx, "self.audio_speaker.set_volume", args, nil); err != nil {
			t.Fatal(err)
		}
	})
	if got > 4 {
		t.Errorf("%v allocations per call, at most 4 allowed", got)
	}
}

type echoPeer struct {
	client *Client
	buf    []byte
}

func (p *echoPeer) SendMCP(payload []byte) error {
	at := bytes.LastIndex(payload, []byte(`"id":`))
	p.buf = append(append(p.buf[:0], `{"jsonrpc":"2.0",`...), payload[at:len(payload)-1]...)
	p.buf = append(p.buf, `,"result":{"content":[{"type":"text","text":"true"}],"isError":false}}`...)
	return p.client.Handle(p.buf)
}
func (p *echoPeer) NotifyMCP(Notification) {}
func (p *echoPeer) DeviateMCP(Deviation)   {}

func FuzzHandle(f *testing.F) {
	f.Add([]byte(`{"jsonrpc":"2.0","id":1,"result":{}}`))
	f.Add([]byte(`{"jsonrpc":"2.0","id":"1","error":{"message":"x"}}`))
	f.Add([]byte(`{"jsonrpc":"2.0","method":"notifications/x","params":{}}`))
	f.Add([]byte(`{"session_id":"","type":"mcp","payload":{"jsonrpc":"2.0","id":51,"error":{"message":"no "film" left"}}}`))
	f.Fuzz(func(t *testing.T, payload []byte) {
		s := newScripted(nil)
		_, ch, err := s.client.register()
		if err != nil {
			t.Fatal(err)
		}
		s.client.nextID, s.client.firstID, s.client.pending[0].id = 2, 1, 1
		if json.Valid(payload) { // else it must only stay within its bounds
			_ = s.client.Handle(payload)
		} else {
			_ = newScripted(nil).client.Handle(payload)
		}
		s.client.HandleBroken(payload)
		select {
		case a := <-ch:
			if a.err == nil && !json.Valid(a.result) {
				t.Errorf("%q answered the request with %q", payload, a.result)
			}
			_, _ = s.client.parseResult(a.result)
		default:
		}
		for _, out := range s.sent {
			if !json.Valid(out) {
				t.Errorf("%q made the client send %q", payload, out)
			}
		}
	})
}

func TestDeviceRequestsAndNotifications(t *testing.T) {
	s := newScripted(nil)
	for _, c := range []struct{ payload, want string }{
		{`{"jsonrpc":"2.0","id":5,"method":"ping"}`, `{"jsonrpc":"2.0","id":5,"result":{}}`},
		{`{"jsonrpc":"2.0","id":"a","method":"roots/list"}`, `{"jsonrpc":"2.0","id":"a","result":{"roots":[]}}`},
		{`{"jsonrpc":"2.0","id":6,"method":"sampling/createMessage","params":{}}`, `{"jsonrpc":"2.0","id":6,"error":{"code":-32601,"message":"Method not found: sampling/createMessage"}}`},
	} {
		if err := s.client.Handle([]byte(c.payload)); err != nil || string(s.sent[len(s.sent)-1]) != c.want {
			t.Errorf("%s: answered %s, %v", c.payload, s.sent[len(s.sent)-1], err)
		}
	}
	if err := s.client.Handle([]byte(`{"jsonrpc":"2.0","method":"notifications/button","params":{"n":1}}`)); err != nil {
		t.Error(err)
	}
	if len(s.notes) != 1 || s.notes[0] != `notifications/button {"n":1}` {
		t.Errorf("notifications %q", s.notes)
	}
	for _, bad := range []string{`[]`, `"x"`, `null`, `{}`, `{"method":5}`, `{"jsonrpc":"2.0","id":{},"method":"ping"}`, `{`} {
		if err := s.client.Handle([]byte(bad)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// A response that arrives after its caller has returned goes to the late handler, once; so
// does the end of the connection.
func TestLateAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScripted(nil)
		var got []string
		late := func(result json.RawMessage, err error) { got = append(got, fmt.Sprintf("%s %v", result, err)) }
		leave := func() string {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := s.client.RequestLate(ctx, "slow", nil, late); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("got %v", err)
			}
			return string(parse(t, s.sent[len(s.sent)-1]).ID)
		}
		first, second := leave(), leave()
		s.hand(`{"jsonrpc":"2.0","id":` + second + `,"result":{"n":2}}`)
		s.hand(`{"jsonrpc":"2.0","id":` + second + `,"result":{"n":3}}`)
		s.hand(`{"jsonrpc":"2.0","id":` + first + `,"error":{"message":"no"}}`)
		if want := []string{`{"n":2} <nil>`, ` device answers error -32000: no`}; !slices.Equal(got, want) || s.count(DeviationLateReply) != 3 {
			t.Errorf("got %q, %d late", got, s.count(DeviationLateReply))
		}
		got = nil
		for range maxLate + 1 {
			leave()
		}
		if want := []string{" " + ErrDropped.Error()}; !slices.Equal(got, want) {
			t.Errorf("got %q", got)
		}
		got = nil
		s.client.Close(errors.New("gone"))
		if len(got) != maxLate || got[0] != " "+fmt.Errorf("%w: gone", ErrClosed).Error() {
			t.Errorf("%d, first %q", len(got), got[:min(1, len(got))])
		}
	})
}
