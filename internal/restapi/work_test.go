package restapi

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"fleetd/internal/connlimit"
	"fleetd/internal/devicetest"
)

// A key over its rate is refused for what needs no device, whichever handler answers;
// calls of tools and other callers go on.
func TestWorkOfOneKey(t *testing.T) {
	f := newFleet(t)
	work := connlimit.NewWork()
	f.api.opt.Work = work
	for range 20 { // large answers of the admin's
		work.Charge("admin", 1<<40)
	}
	for _, path := range []string{"/v1/devices", "/v1/devices/export", "/v1/photos/photo9"} {
		r := f.do(t, "GET", path, "")
		// security: N43
		if r.status != http.StatusTooManyRequests || !strings.Contains(r.body, `"rate_limited"`) || r.header.Get("Retry-After") == "" {
			t.Errorf("%s: %d %s", path, r.status, r.body)
		}
	}
	if n := work.Refused.Load(); n != 3 {
		t.Errorf("%d refused", n)
	}
	if r := f.do(t, "GET", "/livez", ""); r.status != http.StatusOK {
		t.Errorf("/livez: %d", r.status)
	}
	if r := f.do(t, "POST", "/v1/devices/"+string(lamp)+"/tools/self.none/call", `{}`); r.status == http.StatusTooManyRequests {
		t.Errorf("a call: %d %s", r.status, r.body)
	}
}

// A key that is refused for its scopes counts as well: refusals cost work, and are
// recorded.
func TestRefusalsAreWork(t *testing.T) {
	f := newFleet(t)
	work := connlimit.NewWork()
	f.api.opt.Work = work
	token := f.key(t, "speaker", "audio", "")
	id, _, _ := strings.Cut(strings.TrimPrefix(token, "fld_"), "_")
	for range 20 {
		work.Charge(id, 1<<40)
	}
	for _, path := range []string{"/v1/devices", "/v1/devices/export"} {
		// security: N43
		if r := f.do(t, "GET", path, "", as(token)...); r.status != http.StatusTooManyRequests {
			t.Errorf("%s: %d %s", path, r.status, r.body)
		}
	}
}

// reader is a client that keeps nothing of an answer.
type reader struct{ *httptest.ResponseRecorder }

func (reader) Write(b []byte) (int, error) { return len(b), nil }

// An answer counts by its bytes before compression; a stream of events does not.
func TestAnswersAreWork(t *testing.T) {
	for kind, want := range map[string]bool{"application/json": true, "text/event-stream; charset=utf-8": false} {
		work := connlimit.NewWork()
		for range 4 {
			a := &countedAnswer{ResponseWriter: reader{httptest.NewRecorder()}, caller: "a"}
			a.Header().Set("Content-Type", kind)
			for range 1_000 {
				_, _ = a.Write(make([]byte, connlimit.WorkBytes)) // it takes everything
			}
			a.charge(work)
		}
		if err := work.Begin(t.Context(), "a"); (err != nil || work.Waited.Load() > 0) != want {
			t.Errorf("%s: %v, %s waited", kind, err, strconv.FormatUint(work.Waited.Load(), 10))
		}
	}
}

// A client that does not read its answer, or does not send its body, keeps no other request
// of its key waiting.
func TestSlowClientsLeaveTheirSlot(t *testing.T) {
	work := connlimit.NewWork()
	var held []*connlimit.Slot
	free := func() bool { // one more request than there are slots computes
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		s, err := work.Compute(ctx, "a")
		if err == nil {
			held = append(held, s)
		}
		return err == nil
	}
	slot, err := work.Compute(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	for free() { // the rest of them
	}
	defer func() {
		for _, s := range held {
			s.Leave()
		}
	}()
	inside := false
	client := clientFunc(func() { inside = free(); held[len(held)-1].Leave() })
	if _, err := (&pausedAnswer{client, slot}).Write(nil); err != nil || !inside {
		t.Errorf("an answer that is not read keeps its slot: %v", err)
	}
	if _, err := (&pausedBody{client, slot}).Read(nil); err != nil || !inside {
		t.Errorf("a body that does not come keeps its slot: %v", err)
	}
	slot.Leave()
}

// clientFunc is a client that does something while it is waited for.
type clientFunc func()

func (f clientFunc) Header() http.Header       { return nil }
func (f clientFunc) WriteHeader(int)           {}
func (f clientFunc) Write([]byte) (int, error) { f(); return 0, nil }
func (f clientFunc) Read([]byte) (int, error)  { f(); return 0, nil }
func (f clientFunc) Close() error              { return nil }

// Calls that are refused, and large ones, are work of their key; a call that is made is not.
func TestRefusedCallsAreWork(t *testing.T) {
	f := newFleet(t)
	f.connect(t, lamp, devicetest.NewScript())
	work := connlimit.NewWork()
	f.api.opt.Work = work
	for range 20 {
		work.Charge("admin", 1<<40)
	}
	call := func(tool, body string) response {
		return f.do(t, "POST", "/v1/devices/"+string(lamp)+"/tools/"+tool+"/call", body)
	}
	// security: N43
	if r := call("self.none", `{}`); r.status != http.StatusNotFound || work.Refused.Load() != 1 {
		t.Errorf("a refused call: %d, %d over the rate", r.status, work.Refused.Load())
	}
	// security: N43
	if r := call("self.audio_speaker.set_volume", `{"arguments":{"volume":5,"x":"`+strings.Repeat("x", connlimit.BodyWork)+`"}}`); r.status != http.StatusTooManyRequests {
		t.Errorf("a large call: %d", r.status)
	}
	over := work.Refused.Load()
	if r := call("self.audio_speaker.set_volume", `{"arguments":{"volume":5}}`); r.status != http.StatusOK || work.Refused.Load() != over {
		t.Errorf("a call: %d %s, %d over the rate", r.status, r.body, work.Refused.Load())
	}
}
