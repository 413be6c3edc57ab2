package vision

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

const visionKey = "sk-test-7f3a"

// model is an OpenAI-compatible server; answer handles its completions.
func model(t testing.TB, answer http.HandlerFunc) (url string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", answer)
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+visionKey {
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	web := httptest.NewServer(mux)
	t.Cleanup(web.Close)
	return web.URL + "/v1"
}

func withChat(url string) func(*Options) {
	return func(o *Options) { o.Chat = ChatOptions{URL: url, Model: "seer", Key: visionKey} }
}

func completion(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		content, _ := json.Marshal(text)
		_, _ = io.WriteString(w, `{"choices":[{"index":0,"message":{"role":"assistant","content":`+string(content)+`}}]}`)
	}
}

// newChatServer also closes the explainer at the end of the test.
func newChatServer(t testing.TB, change ...func(*Options)) *testServer {
	t.Helper()
	c := newTestServer(t, change...)
	t.Cleanup(c.vision.Close)
	return c
}

func (r result) text(t testing.TB) string {
	t.Helper()
	var body struct{ Text string }
	if err := json.Unmarshal([]byte(r.raw), &body); err != nil {
		t.Fatal(err)
	}
	return body.Text
}

// The request contains the question and the unchanged picture, and the device receives the
// text with its response.
func TestChatExplains(t *testing.T) {
	t.Parallel()
	jpeg := picture(t, 1200)
	asked := make(chan chatRequest, 1)
	c := newChatServer(t, withChat(model(t, func(w http.ResponseWriter, r *http.Request) {
		if got := r.Header.Get("Authorization"); got != "Bearer "+visionKey {
			t.Errorf("Authorization %q", got)
		}
		var body chatRequest
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		asked <- body
		completion("A <cat> & a \"dog\".")(w, r)
	})))
	r := c.wire(t, c.cameraHead(robot)+chunked(cameraBody("what is \"it\"?", jpeg), 4096))
	if want := `{"success":true,"photo":"` + r.must(t) + `","text":"A <cat> & a \"dog\"."}`; r.raw != want {
		t.Errorf("%s\nwant %s", r.raw, want)
	}
	body := <-asked
	if body.Model != "seer" || len(body.Messages) != 1 || len(body.Messages[0].Content) != 2 || body.Messages[0].Content[0].Text != "what is \"it\"?" {
		t.Fatalf("the request is %.200v", body)
	}
	data, found := strings.CutPrefix(body.Messages[0].Content[1].ImageURL.URL, "data:image/jpeg;base64,")
	if sent, err := base64.StdEncoding.DecodeString(data); !found || err != nil || string(sent) != string(jpeg) {
		t.Errorf("the picture differs: %d bytes, %v", len(sent), err)
	}
	if n, _, _ := c.vision.ExplainTime.Snapshot(); n != 1 || c.vision.Explanations.Get(outcomeExplained) != 1 || c.vision.Explaining.Load() != 0 {
		t.Errorf("%d observations", n)
	}
	if err := c.vision.CheckExplainer(t.Context()); err != nil {
		t.Error(err)
	}
}

// Whatever the explainer does, the photo is stored and the response fits into a device.
func TestExplainerFailures(t *testing.T) {
	var other atomic.Int64
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { other.Add(1) }))
	t.Cleanup(elsewhere.Close)
	status := func(code int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			_, _ = io.WriteString(w, body)
		}
	}
	cases := []struct {
		name    string
		answer  http.HandlerFunc
		outcome string
		text    string
	}{
		{"key refused, and repeated", status(401, `{"error":{"message":"wrong key `+visionKey+`"}}`), outcomeFailed, ""},
		{"over its quota", status(429, visionKey), outcomeFailed, ""},
		{"redirect", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
		}, outcomeFailed, ""},
		{"not JSON", status(200, "<html>"), outcomeFailed, ""},
		{"no choice", status(200, `{"choices":[]}`), outcomeFailed, ""},
		{"null", status(200, `{"choices":[{"message":{"content":null}}]}`), outcomeFailed, ""},
		{"only control characters", completion("\x00\x1b\n "), outcomeFailed, ""},
		{"endless", func(w http.ResponseWriter, _ *http.Request) {
			for {
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					return
				}
			}
		}, outcomeFailed, ""},
		{"cut off", func(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }, outcomeFailed, ""},
		{"parts", status(200, `{"choices":[{"message":{"content":[{"type":"text","text":"a "},{"type":"text","text":"cat"}]}}]}`), outcomeExplained, "a cat"},
		{"hostile text", completion("a\x1b[31m\u202ecat\u2028\t\x00\u0085!"), outcomeExplained, "acat  !"},
		{"long text", completion(strings.Repeat("猫\"", 5000)), outcomeExplained, strings.Repeat("猫\"", maxText/5)},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			var log strings.Builder
			c := newChatServer(t, withChat(model(t, tc.answer)), func(o *Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
			r := c.camera(t, robot, strings.NewReader(cameraBody("q", picture(t, 64))))
			id := r.must(t)
			if got := r.text(t); got != tc.text || !utf8.ValidString(got) || c.vision.Explanations.Get(tc.outcome) != 1 {
				t.Errorf("%.300s, outcome not %s", r.raw, tc.outcome)
			}
			// security: D8
			if _, content := c.content(t, id); len(content) == 0 || len(c.ports.Seen(devices.EventPhoto)) != 1 {
				t.Error("the photo is lost")
			}
			// security: D8
			if strings.Contains(log.String(), visionKey) || tc.outcome == outcomeFailed && !strings.Contains(log.String(), id) {
				t.Errorf("log: %s", log.String())
			}
		})
	}
	// security: D8
	if other.Load() != 0 {
		t.Error("a redirect was followed")
	}
}

// A slow server costs the device the explanation and nothing else, within the time that it
// waits.
func TestLateExplanation(t *testing.T) {
	c := newChatServer(t, withChat(model(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then a disconnected client is detected
		<-r.Context().Done()
	})))
	c.vision.budget = 150 * time.Millisecond
	begun := time.Now()
	answer := c.wire(t, c.cameraHead(robot)+chunked(cameraBody("q", picture(t, 64)), 4096))
	// security: D8
	if answer.status != http.StatusOK || answer.Photo == "" || answer.Message != lateMessage || time.Since(begun) > 5*time.Second {
		t.Errorf("%s after %v", answer.raw, time.Since(begun))
	}
	if c.vision.Explanations.Get(outcomeLate) != 1 {
		t.Error("not counted as late")
	}
}

// unfired is a context whose deadline has passed, and whose timer has not run yet.
type unfired struct{ context.Context }

func (unfired) Deadline() (time.Time, bool) { return time.Now().Add(-time.Millisecond), true }

// A connection that ends at the deadline may say so before the context does.
func TestOutcomeAtTheDeadline(t *testing.T) {
	if outcome := outcomeOf(unfired{t.Context()}, os.ErrDeadlineExceeded); outcome != outcomeLate {
		t.Errorf("the outcome is %s", outcome)
	}
}

// Photos above the limit wait; above that limit they are not explained.
func TestTooManyExplanations(t *testing.T) {
	e := newExplanations(&responder{})
	for range MaxExplaining {
		if outcome := e.enter(t.Context()); outcome != "" {
			t.Fatal(outcome)
		}
	}
	outcomes := make(chan string, MaxWaiting)
	for range MaxWaiting {
		go func() { outcomes <- e.enter(t.Context()) }()
	}
	devicetest.Eventually(t, "all wait", func() bool { return e.waiting.Load() == MaxWaiting })
	if outcome := e.enter(t.Context()); outcome != outcomeBusy {
		t.Errorf("above the limit: %q", outcome)
	}
	for range MaxWaiting {
		e.leave()
		if outcome := <-outcomes; outcome != "" {
			t.Errorf("after waiting: %q", outcome)
		}
	}
}

// A slow explainer uses no slot for uploads.
func TestExplanationsUseNoUploadSlot(t *testing.T) {
	release := make(chan struct{})
	c := newChatServer(t, withChat(model(t, func(w http.ResponseWriter, r *http.Request) {
		<-release
		completion("a cat")(w, r)
	})))
	done := make(chan result, 1)
	go func() { done <- c.camera(t, robot, strings.NewReader(cameraBody("q", picture(t, 64)))) }()
	devicetest.Eventually(t, "the explanation runs", func() bool { return c.vision.Explaining.Load() == 1 })
	// security: D8
	if n := c.vision.InProgress.Load(); n != 0 || len(c.vision.slots) != 0 {
		t.Errorf("%d uploads in progress", n)
	}
	close(release)
	if r := <-done; r.text(t) != "a cat" {
		t.Error(r.raw)
	}
}

// Without a URL, a service that responds on NATS is used; it finds the picture where the
// question specifies.
func TestResponderExplains(t *testing.T) {
	const subject = "test.vision.explain"
	c := newTestServer(t, func(o *Options) { o.Subject = subject })
	jpeg := picture(t, 64)
	upload := func() result { return c.camera(t, robot, strings.NewReader(cameraBody("what?", jpeg))) }
	if r := upload(); r.must(t) == "" || r.raw != `{"success":true,"photo":"`+r.Photo+`"}` || c.vision.Explanations.Get(outcomeNone) != 1 {
		t.Errorf("without a responder: %s", r.raw)
	}
	answer := `{"text":"a cat"}`
	asked := make(chan request, 1)
	sub, err := c.js.Conn().Subscribe(subject, func(m *nats.Msg) {
		var ask request
		if err := json.Unmarshal(m.Data, &ask); err != nil {
			t.Error(err)
		}
		asked <- ask
		_ = m.Respond([]byte(answer))
	})
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Unsubscribe()
	r := upload()
	var ask request
	select {
	case ask = <-asked:
	default:
		t.Fatalf("the responder is not asked: %s", r.raw)
	}
	if r.text(t) != "a cat" || ask.Device != string(robot) || ask.Photo != r.must(t) || ask.Question != "what?" || ask.Path != "/v1/photos/"+ask.Photo ||
		ask.TimeoutMS < 1000 || ask.TimeoutMS > ExplainTime.Milliseconds() {
		t.Errorf("%s for %+v", r.raw, ask)
	}
	objects, err := c.js.ObjectStore(t.Context(), ask.Store)
	if err != nil {
		t.Fatal(err)
	}
	content, err := objects.GetBytes(t.Context(), ask.Object)
	photo, _ := c.content(t, ask.Photo)
	if err != nil || string(content) != string(jpeg) || ask.SHA256 != photo.SHA256 || ask.Bytes != photo.Bytes {
		t.Errorf("%d bytes, %v, %+v", len(content), err, ask)
	}
	for _, answer = range []string{`{"error":"no model"}`, `nonsense`, `{}`, `"text"`} {
		if r := upload(); r.raw != `{"success":true,"photo":"`+r.must(t)+`"}` {
			t.Errorf("%s: %s", answer, r.raw)
		}
		<-asked
	}
	if n := c.vision.Explanations.Get(outcomeFailed); n != 4 {
		t.Errorf("%d failed", n)
	}
}

// The diagnosis contains why photos are not explained, and never the key.
func TestCheckExplainer(t *testing.T) {
	url := model(t, completion(""))
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	noList := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(noList.Close)
	for _, tc := range []struct {
		name, want string
		opt        ChatOptions
	}{
		{"right", "", ChatOptions{URL: url, Key: visionKey}},
		{"wrong key", "check --vision-key", ChatOptions{URL: url, Key: "wrong-" + visionKey}},
		{"not reachable", "does not answer", ChatOptions{URL: gone.URL, Key: visionKey}},
		{"no list of models", "", ChatOptions{URL: noList.URL, Key: visionKey}},
		{"not configured", "", ChatOptions{}},
	} {
		c := newChatServer(t, func(o *Options) { o.Chat = tc.opt })
		err := c.vision.CheckExplainer(t.Context())
		if (err == nil) != (tc.want == "") || err != nil && (!strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), visionKey)) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	if err := c404(t); err == nil || !strings.Contains(err.Error(), "--vision-model") {
		t.Errorf("404 of the chat itself: %v", err)
	}
}

// c404 sends a request to a server without chat completions.
func c404(t *testing.T) error {
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	chat := newChat(ChatOptions{URL: web.URL}, nil)
	defer chat.client.CloseIdleConnections()
	_, err := chat.send(t.Context(), http.MethodPost, "/chat/completions", "{}")
	return err
}
