package fleettest

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// signedReceiver takes deliveries of one webhook, and checks their signatures.
type signedReceiver struct {
	*httptest.Server
	t *testing.T

	mu   sync.Mutex
	key  []byte
	ids  map[string]int    // how often each id was delivered
	of   map[string]string // of the deliveries of a device by their type
	gaps int
}

func newSignedReceiver(t *testing.T) *signedReceiver {
	r := &signedReceiver{t: t, ids: map[string]int{}, of: map[string]string{}}
	r.Server = httptest.NewServer(r)
	t.Cleanup(r.Close)
	return r
}

func (r *signedReceiver) ServeHTTP(_ http.ResponseWriter, req *http.Request) {
	var message struct {
		Type string
		Gap  json.RawMessage
		Data struct{ Device string }
	}
	body, err := io.ReadAll(req.Body)
	if err != nil || json.Unmarshal(body, &message) != nil {
		r.t.Errorf("%q, %v", body, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	id := req.Header.Get("webhook-id")
	mac := hmac.New(sha256.New, r.key)
	fmt.Fprintf(mac, "%s.%s.%s", id, req.Header.Get("webhook-timestamp"), body)
	if want := "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil)); req.Header.Get("webhook-signature") != want {
		r.t.Errorf("%s has the signature %s, want %s", id, req.Header.Get("webhook-signature"), want)
	}
	r.ids[id]++
	r.of[message.Data.Device] = message.Type
	if len(message.Gap) > 0 {
		r.gaps++
	}
}

// has reports whether a delivery of this type was the last of a device.
func (r *signedReceiver) has(device, kind string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.of[device] == kind
}

// Webhooks come back with a backup: they sign with the secrets that receivers have, and deliver what happens from then
// on, with a gap for what the backup does not have. Nothing that was delivered is delivered again, neither from before
// the backup nor from after it.
func TestWebhooksAreRestored(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--webhook-allow", "127.0.0.1")
	r := newSignedReceiver(t)
	hook, err := node.CreateWebhook(t.Context(), api.NewWebhook{URL: r.URL, Types: []string{"online", "offline"}})
	if err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	r.key, err = base64.StdEncoding.DecodeString(strings.TrimPrefix(hook.Secret, "whsec_"))
	r.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	device := func(n int) string { return fmt.Sprintf("02:ec:00:00:00:%02x", n) }
	comesAndGoes := func(on *Node, n int) {
		t.Helper()
		sim := programs.Simulate(t, on.Info.OTA, "--devices", "1", "--mac-base", device(n), "--seed", fmt.Sprint(n+1), "--transport", "mqtt")
		on.Await(t, "online is delivered", 30*time.Second, func() bool { return r.has(device(n), "online") })
		before := r.deliveries()
		sim.Report(t)
		on.Await(t, "offline is delivered", 30*time.Second, func() bool { return r.has(device(n), "offline") && r.deliveries() == before+1 })
	}
	comesAndGoes(node, 0)
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	if out, errs, status := node.Command(t, "backup", "-o", file); status != 0 {
		t.Fatalf("backup: %s%s", out, errs)
	}
	comesAndGoes(node, 1) // after the backup
	node.Stop(t)
	delivered := r.deliveries()

	restored := &Node{Dir: filepath.Join(t.TempDir(), "restored"), Info: node.Info, programs: programs, args: node.args}
	if out, errs, status := restored.Command(t, "restore", file); status != 0 {
		t.Fatalf("restore: %s%s", out, errs)
	}
	restored.Run(t)
	t.Cleanup(func() { restored.Stop(t) })
	list, err := apiclient.Collect(apiclient.List[api.Webhook](t.Context(), restored.Client, nil, "webhooks"))
	if err != nil || len(list) != 1 || list[0].ID != hook.ID {
		t.Errorf("restored are %+v, %v", list, err)
	}
	outcome, err := apiclient.Send[api.WebhookTest](t.Context(), restored.Client, apiclient.Request{Method: "POST", Path: []string{"webhooks", hook.ID, "test"}})
	if err != nil || !outcome.Delivered {
		t.Errorf("test: %+v, %v", outcome, err)
	}
	comesAndGoes(restored, 2)
	if n := r.deliveries(); n != delivered+1+2 {
		t.Errorf("%d deliveries after the restore, want a test and two", n-delivered)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, times := range r.ids {
		if times != 1 {
			t.Errorf("%s was delivered %d times", id, times)
		}
	}
	if r.gaps != 1 {
		t.Errorf("%d deliveries name a gap", r.gaps)
	}
}

// deliveries counts the deliveries.
func (r *signedReceiver) deliveries() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, times := range r.ids {
		n += times
	}
	return n
}
