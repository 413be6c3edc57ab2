package provision

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/attest"
	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/rollout"
)

func vector(t testing.TB, name string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "testdata", "vectors", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

// Every recorded reply that harms a device is refused. The others pass, except where these
// rules are stricter.
func TestCheckVectors(t *testing.T) {
	var v struct {
		Cases []struct{ Body, Device string }
	}
	vector(t, "ota_responses", &v)
	seen := 0
	for _, c := range v.Cases {
		if c.Body == "" {
			continue
		}
		seen++
		err := Check([]byte(c.Body))
		harmful := strings.Contains(c.Device, "ABORT") || strings.Contains(c.Device, "stored as a string") ||
			strings.Contains(c.Device, "MQTT wins") || strings.Contains(c.Device, "force ignored")
		if harmful != (err != nil) || err != nil && !errors.Is(err, ErrUnsafe) {
			t.Errorf("%s\n%s: %v", c.Body, c.Device, err)
		}
	}
	if seen < 10 {
		t.Fatalf("%d cases", seen)
	}
}

func TestCheckRefuses(t *testing.T) {
	for name, body := range map[string]string{
		"too long":          `{"server_time":{"x":"` + strings.Repeat("x", 3999) + `","y":"` + strings.Repeat("y", 3000) + `"}}`,
		"long string":       `{"websocket":{"token":"` + strings.Repeat("x", 4000) + `"}}`,
		"long key":          `{"mqtt":{"sixteen_chars_xx":"v"}}`,
		"IPv6 endpoint":     `{"mqtt":{"endpoint":"[::1]:1883"}}`,
		"IPv6 url":          `{"websocket":{"url":"ws://[::1]:8000/"}}`,
		"http url":          `{"websocket":{"url":"http://h/"}}`,
		"user info":         `{"websocket":{"url":"ws://u:p@h/"}}`,
		"bad port":          `{"websocket":{"url":"ws://h:0/"}}`,
		"endpoint port":     `{"mqtt":{"endpoint":"h:x"}}`,
		"version":           `{"firmware":{"version":"2..1","url":""}}`,
		"version v":         `{"firmware":{"version":"v2.1","url":""}}`,
		"huge version":      `{"firmware":{"version":"99999999999","url":""}}`,
		"version over int":  `{"firmware":{"version":"2.2147483648","url":""}}`,
		"user and port":     `{"websocket":{"url":"ws://u:p@h:80/"}}`,
		"force":             `{"firmware":{"version":"2.1","url":"","force":2}}`,
		"endpoint port 0":   `{"mqtt":{"endpoint":"h:0"}}`,
		"keepalive text":    `{"mqtt":{"keepalive":"120"}}`,
		"not object":        `[]`,
		"section no object": `{"websocket":[]}`,
		"twice":             `{"websocket":{},"websocket":{}}`,
		"twice by case":     `{"websocket":{},"WebSocket":{}}`,
		"long key by case":  `{"MQTT":{"sixteen_chars_xx":"v"}}`,
		"version by case":   `{"Firmware":{"VERSION":"v2.1","url":""}}`,
		"IPv6 unbracketed":  `{"websocket":{"url":"ws://::1"}}`,
		"empty port":        `{"websocket":{"url":"ws://h:/"}}`,
		"query for a path":  `{"websocket":{"url":"ws://h?a/b"}}`,
		"NUL":               `{"mqtt":{"endpoint":"h\u0000:1883"}}`,
		"NUL in a name":     `{"mqtt\u0000":{"endpoint":"h"}}`,
		"half a pair":       `{"server_time":{"timeZone":"\ud83d"}}`,
	} {
		// security: D13
		if err := Check([]byte(body)); !errors.Is(err, ErrUnsafe) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := Check([]byte(`{"websocket":{"url":"ws://192.0.2.1/a","token":"C:\\u0000"}}`)); err != nil {
		t.Error(err)
	}
	if err := Check([]byte(`{"mqtt":{"endpoint":"192.0.2.1:1883","keepalive":120},"firmware":{"version":"2.4.2","url":"http://192.0.2.5/f.bin","force":1}}`)); err != nil {
		t.Error(err)
	}
}

// fakeRollouts offers what it is told to.
type fakeRollouts struct {
	offer *rollout.Offer
	seen  []rollout.Check
}

func (f *fakeRollouts) Check(_ context.Context, c *rollout.Check) *rollout.Offer {
	f.seen = append(f.seen, *c)
	return f.offer
}

func (f *fakeRollouts) Open(context.Context, string, netip.Addr) (*rollout.Download, error) {
	return nil, rollout.ErrNoDownload
}

type bench struct {
	rollouts fakeRollouts
	*devicetest.Ports
	service *fleet.Service
	mint    *credential.Mint
	server  *Server
	mux     *http.ServeMux
}

func newBench(t testing.TB, cfg fleet.Config, change func(*Options)) *bench {
	t.Helper()
	mint, err := credential.New([]byte("a secret for tests only"))
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{Ports: devicetest.New(), mint: mint, mux: http.NewServeMux()}
	b.service = b.Service(t, cfg)
	opt := Options{Service: b.service, Mint: mint, Attest: attest.New(b.Ports, mint, slog.New(slog.DiscardHandler)), PublicURL: "http://192.0.2.1:8000", Framing: 1, Location: time.FixedZone("X", 8*3600), Rollouts: &b.rollouts, Draining: func() bool { return false }, Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&opt)
	}
	b.server = New(opt)
	b.server.Register(b.mux)
	return b
}

func (b *bench) do(method, path, body string, header map[string]string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	for k, v := range header {
		r.Header.Set(k, v)
	}
	w := httptest.NewRecorder()
	b.mux.ServeHTTP(w, r)
	return w
}

type otaReply struct {
	Activation *struct{ Code, Challenge, Message string }
	WebSocket  *struct {
		URL, Token string
		Version    int
	}
	MQTT       json.RawMessage
	Firmware   json.RawMessage
	ServerTime struct {
		Timestamp int64
		Offset    int `json:"timezone_offset"`
	} `json:"server_time"`
}

func decode(t *testing.T, w *httptest.ResponseRecorder) otaReply {
	t.Helper()
	var r otaReply
	if w.Code != 200 {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	if err := Check(w.Body.Bytes()); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(w.Body.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

const mac = "aa:bb:cc:dd:ee:ff"

func TestRequestVector(t *testing.T) {
	var v struct {
		Request struct {
			Headers [][2]string `json:"headers_in_wire_order"`
			Body    string
		}
	}
	vector(t, "ota_request", &v)
	header := map[string]string{}
	for _, h := range v.Request.Headers {
		header[h[0]] = h[1]
	}
	b := newBench(t, fleet.Config{}, nil)
	r := decode(t, b.do("POST", PathOTA, v.Request.Body, header))
	if r.WebSocket == nil || r.WebSocket.URL != "ws://192.0.2.1:8000/xiaozhi/v1/" || r.WebSocket.Version != 1 || r.Activation != nil || r.MQTT != nil || r.Firmware != nil ||
		!b.mint.IsDevice(r.WebSocket.Token, mac, "5f0c1d3e-0000-4000-8000-000000000001", 0) || r.ServerTime.Offset != 480 {
		t.Errorf("%+v", r)
	}
	d, _, _, _ := b.Of(mac)
	if d.Board != "bread-compact-wifi" || d.Firmware != "2.4.2" || d.Chip != "esp32s3" || len(d.ELF) != 64 || d.Language != "zh-CN" || d.ActivateV2 {
		t.Errorf("%+v", d)
	}
	if again := decode(t, b.do("POST", PathOTAWS, v.Request.Body, header)); again.WebSocket.Token != r.WebSocket.Token {
		t.Error("the token changes between checks, which wears out the device's flash")
	}
	// The firmware follows no redirect to the URL with the slash that a person forgot.
	for _, path := range []string{PathOTA, PathOTAWS} {
		typed := strings.TrimSuffix(path, "/")
		if again := decode(t, b.do("POST", typed, v.Request.Body, header)); again.WebSocket.Token != r.WebSocket.Token {
			t.Errorf("POST %s: %+v", typed, again)
		}
		if w := b.do("GET", typed, "", nil); w.Code != 200 || !strings.Contains(w.Body.String(), "This is fleetd") {
			t.Errorf("GET %s: %d %s", typed, w.Code, w.Body)
		}
	}
}

func TestInvalidJSONBodies(t *testing.T) {
	b := newBench(t, fleet.Config{}, nil)
	header := map[string]string{"Device-Id": mac, "Client-Id": "c1", "User-Agent": "esp-box-3/2.1.0"}
	for name, body := range map[string]string{
		"quote in the SSID": `{"version":2,"mac_address":"` + mac + `","chip_model_name":"esp32s3","application":{"name":"xiaozhi","version":"2.2.6","elf_sha256":"ab"},"board":{"type":"t","name":"otto","ssid":"my "home"","csq":"21"}}`,
		"nothing":           "", "text": "hello", "array": "[1,2]", "numbers as strings": `{"minimum_free_heap_size":"123","flash_size":"16"}`,
		"NUL": "\x00\x00", "invalid UTF-8": "{\"board\":{\"name\":\"\xff\"}}", "deep": strings.Repeat("[", 10000),
	} {
		decode(t, b.do("POST", PathOTA, body, header))
		d, _, _, _ := b.Of(mac)
		if name == "quote in the SSID" && (d.Board != "otto" || d.Firmware != "2.2.6") {
			t.Errorf("%s: %+v", name, d)
		}
		if name == "nothing" && (d.Board != "esp-box-3" || d.Firmware != "2.1.0") {
			t.Errorf("headers alone: %+v", d)
		}
	}
	if w := b.do("POST", PathOTA, strings.Repeat("x", MaxRequest+1), header); w.Code != 400 {
		t.Errorf("a body over the limit: %d", w.Code)
	}
	for _, id := range []string{"", "a b", "../x", strings.Repeat("x", 65)} {
		if w := b.do("POST", PathOTA, "{}", map[string]string{"Device-Id": id}); w.Code != 400 {
			t.Errorf("id %q: %d", id, w.Code)
		}
	}
	if w := b.do("GET", PathOTA, "", nil); w.Code != 200 || !strings.Contains(w.Body.String(), "fleetd") {
		t.Errorf("a browser: %d %s", w.Code, w.Body)
	}
}

func TestActivation(t *testing.T) {
	var v struct {
		Body string `json:"request_body"`
	}
	vector(t, "activation_v2", &v)
	b := newBench(t, fleet.Config{Approve: true}, nil)
	header := map[string]string{"Device-Id": mac, "Client-Id": "c1", "Activation-Version": "2", "Serial-Number": "SN0123456789ABCDEF0123456789ABCD"}
	r := decode(t, b.do("POST", PathOTA, "{}", header))
	if r.Activation == nil || len(r.Activation.Code) != 6 || r.Activation.Challenge == "" || r.WebSocket == nil || r.WebSocket.Token != "" {
		t.Fatalf("%+v", r)
	}
	for _, body := range []string{v.Body, "{}", "", "x"} {
		if w := b.do("POST", PathOTA+"activate", body, header); w.Code != http.StatusAccepted {
			t.Errorf("waiting: %d", w.Code)
		}
	}
	if _, err := b.service.Approve(t.Context(), devicetest.Admin, r.Activation.Code, ""); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{PathOTA, PathOTAWS} {
		if w := b.do("POST", path+"activate", v.Body, header); w.Code != http.StatusOK {
			t.Errorf("approved: %d", w.Code)
		}
	}
	if r := decode(t, b.do("POST", PathOTA, "{}", header)); r.Activation != nil || r.WebSocket.Token == "" {
		t.Errorf("%+v", r)
	}
}

// The firmware's own body, with the key and challenge of the vector, admits the device at
// once; the next check returns its credentials.
func TestActivationByHardware(t *testing.T) {
	var v struct {
		Key string `json:"efuse_key0_hex"`
	}
	vector(t, "activation_v2", &v)
	b := newBench(t, fleet.Config{Approve: true}, nil)
	const serial = "SN0123456789ABCDEF0123456789ABCD"
	if err := b.server.opt.Attest.Import(t.Context(), []devices.Chip{{Serial: serial, Key: v.Key}}); err != nil {
		t.Fatal(err)
	}
	header := map[string]string{"Device-Id": mac, "Client-Id": "c1", "Activation-Version": "2", "Serial-Number": serial}
	challenge := decode(t, b.do("POST", PathOTA, "{}", header)).Activation.Challenge
	body := func(key string) string {
		secret, err := hex.DecodeString(key)
		if err != nil {
			t.Fatal(err)
		}
		h := hmac.New(sha256.New, secret)
		h.Write([]byte(challenge))
		return fmt.Sprintf(`{"algorithm":"hmac-sha256","serial_number":%q,"challenge":%q,"hmac":"%x"}`, serial, challenge, h.Sum(nil))
	}
	b.SetAway(true)
	if w := b.do("POST", PathOTA+"activate", body(v.Key), header); w.Code != http.StatusAccepted {
		t.Errorf("without a database: %d", w.Code)
	}
	b.SetAway(false)
	if w := b.do("POST", PathOTA+"activate", body(v.Key), header); w.Code != http.StatusOK {
		t.Errorf("proven: %d", w.Code)
	}
	if r := decode(t, b.do("POST", PathOTA, "{}", header)); r.Activation != nil || r.WebSocket.Token == "" {
		t.Errorf("%+v", r)
	}
}

// Clients that try keys get a delayed 429, and each guess needs a new challenge.
func TestWrongProofsAreSlowedDown(t *testing.T) {
	t.Parallel()
	b := newBench(t, fleet.Config{Approve: true}, func(o *Options) { o.Failures = connlimit.NewFailures(nil) })
	if err := b.server.opt.Attest.Import(t.Context(), []devices.Chip{{Serial: "SN", Key: strings.Repeat("0a", 32)}}); err != nil {
		t.Fatal(err)
	}
	header := map[string]string{"Device-Id": mac, "Client-Id": "c1"}
	guess := func() int {
		challenge := decode(t, b.do("POST", PathOTA, "{}", header)).Activation.Challenge
		return b.do("POST", PathOTA+"activate", `{"algorithm":"hmac-sha256","serial_number":"SN","challenge":"`+challenge+`","hmac":"`+strings.Repeat("00", 32)+`"}`, header).Code
	}
	for range connlimit.FailureBurst {
		if code := guess(); code != http.StatusAccepted {
			t.Fatal(code)
		}
		// A device without a serial number waits for its code, and does not count as a guess.
		if w := b.do("POST", PathOTA+"activate", "{}", header); w.Code != http.StatusAccepted {
			t.Fatal(w.Code)
		}
	}
	begun := time.Now()
	// security: D7
	if code := guess(); code != http.StatusTooManyRequests || time.Since(begun) < connlimit.FailureDelay {
		t.Errorf("above the limit: %d after %v", code, time.Since(begun))
	}
}

// A device that waits for approval receives the server, but no credentials: an empty name
// and password clear those in its flash.
func TestWaitingOverMQTT(t *testing.T) {
	b := newBench(t, fleet.Config{Approve: true}, func(o *Options) { o.MQTT = &MQTT{Endpoint: "192.0.2.1:1883", Keepalive: 60} })
	var login struct{ Username, Password, Endpoint string }
	for _, approved := range []bool{false, true} {
		r := decode(t, b.do("POST", PathOTAMQTT, "{}", map[string]string{"Device-Id": mac, "Client-Id": "c1"}))
		if err := json.Unmarshal(r.MQTT, &login); err != nil || login.Endpoint == "" || (r.Activation == nil) != approved || (login.Username != "") != approved || (login.Password != "") != approved {
			t.Fatalf("approved %t: %+v, %s, %v", approved, r, r.MQTT, err)
		}
		if !approved {
			if _, err := b.service.Approve(t.Context(), devicetest.Admin, r.Activation.Code, ""); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestRateLimitPerAddress(t *testing.T) {
	b := newBench(t, fleet.Config{}, func(o *Options) {
		o.RatePerMinute, o.Burst = 1, 3
		o.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("192.0.2.1/32")} // httptest's peer
	})
	ask := func(from string) int {
		return b.do("POST", PathOTA, "{}", map[string]string{"Device-Id": mac, "Client-Id": "c", "X-Forwarded-For": "203.0.113.9, " + from}).Code
	}
	for range 3 {
		if got := ask("198.51.100.1"); got != 200 {
			t.Fatal(got)
		}
	}
	if got := ask("198.51.100.1"); got != http.StatusTooManyRequests {
		t.Errorf("the fourth: %d", got)
	}
	if got := ask("198.51.100.2"); got != 200 {
		t.Errorf("another address: %d", got)
	}
}

// A client that invents ids can add only a limited number of devices per address; all
// addresses of an IPv6 /64 count as one. Known devices and other addresses are not affected.
func TestNewMembersPerAddress(t *testing.T) {
	for _, approve := range []bool{false, true} {
		b := newBench(t, fleet.Config{Approve: approve}, func(o *Options) {
			o.NewPerMinute = 2
			o.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("192.0.2.1/32")} // httptest's peer
		})
		ask := func(from string, n int) *httptest.ResponseRecorder {
			return b.do("POST", PathOTA, "{}", map[string]string{"Device-Id": fmt.Sprintf("02:00:00:00:01:%02x", n), "Client-Id": "c", "X-Forwarded-For": from})
		}
		burst := 2 * newBurst
		for n := range burst {
			if w := ask(fmt.Sprintf("2001:db8::%x", n+1), n); w.Code != http.StatusOK {
				t.Fatalf("device %d: %d %s", n, w.Code, w.Body)
			}
		}
		if findings := fmt.Sprint(b.server.Diagnose("").Findings); strings.Contains(findings, "--new-members-per-address") {
			t.Errorf("the diagnosis warns before anything happened: %s", findings)
		}
		w := ask("2001:db8::ffff", burst)
		// security: D15
		if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" {
			t.Errorf("above the limit: %d %v", w.Code, w.Header())
		}
		if n := b.server.Replies.Get("too_many_new"); n != 1 {
			t.Errorf("%d refusals counted", n)
		}
		if findings := fmt.Sprint(b.server.Diagnose("").Findings); !strings.Contains(findings, "--new-members-per-address") {
			t.Errorf("the diagnosis does not contain it: %s", findings)
		}
		want := burst
		if approve { // they wait in memory
			want = 0
		}
		if n := len(b.Devices()); n != want {
			t.Errorf("%d devices are stored, want %d", n, want)
		}
		if w := ask("2001:db8::ffff", 3); w.Code != http.StatusOK {
			t.Errorf("a known device: %d", w.Code)
		}
		if w := ask("2001:db8:0:1::1", burst); w.Code != http.StatusOK {
			t.Errorf("another address: %d", w.Code)
		}
	}
}

// While as many unknown devices are worked on as may be, a further one waits, and known ones do not.
func TestUnknownDevicesInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, fleet.Config{}, nil)
		ask := func(id string) (code int, waited time.Duration) {
			begun := time.Now()
			return b.do("POST", PathOTA, "{}", map[string]string{"Device-Id": id, "Client-Id": "c"}).Code, time.Since(begun)
		}
		if code, _ := ask(mac); code != http.StatusOK {
			t.Fatal(code)
		}
		for range maxJoining {
			b.server.joining <- struct{}{}
		}
		// security: N47
		if code, waited := ask(mac); code != http.StatusOK || waited != 0 {
			t.Errorf("a known device: %d after %v", code, waited)
		}
		// security: N47
		if code, waited := ask("02:00:00:00:01:01"); code != http.StatusServiceUnavailable || waited != joinWait {
			t.Errorf("an unknown device: %d after %v", code, waited)
		}
		time.AfterFunc(joinWait/2, func() { <-b.server.joining })
		if code, waited := ask("02:00:00:00:01:01"); code != http.StatusOK || waited != joinWait/2 {
			t.Errorf("a place is free: %d after %v", code, waited)
		}
	})
}

// HAProxy, among others, adds a second field instead of extending the first. Text from the
// client must not choose its rate limit.
func TestForwardedForInTwoFields(t *testing.T) {
	b := newBench(t, fleet.Config{}, func(o *Options) {
		o.RatePerMinute, o.Burst = 1, 1
		o.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("192.0.2.1/32")}
	})
	for i, want := range []int{http.StatusOK, http.StatusTooManyRequests} {
		r := httptest.NewRequest("POST", PathOTA, strings.NewReader("{}"))
		r.Header.Set("Device-Id", mac)
		r.Header.Add("X-Forwarded-For", fmt.Sprintf("203.0.113.%d", i))
		r.Header.Add("X-Forwarded-For", "198.51.100.1")
		w := httptest.NewRecorder()
		if b.mux.ServeHTTP(w, r); w.Code != want {
			t.Errorf("request %d: %d, want %d", i, w.Code, want)
		}
	}
}

// The GET of an offer is not refused for what else comes from its address, whichever node made the offer; guesses of tokens are.
func TestOffersAreNotLimited(t *testing.T) {
	b := newBench(t, fleet.Config{}, func(o *Options) { o.RatePerMinute, o.Burst = 1, 1 })
	code := func(token string, left time.Duration) string {
		return b.mint.Code("offer "+token, clock.Now().Add(left))
	}
	for _, c := range []struct {
		path string
		want int
	}{{"a." + code("a", time.Minute), http.StatusNotFound}, {"b", http.StatusNotFound}, {"b", http.StatusTooManyRequests}, {"b." + code("a", time.Minute), http.StatusTooManyRequests},
		{"a." + code("a", -time.Minute), http.StatusTooManyRequests}, {"a." + code("a", time.Minute), http.StatusNotFound}} {
		w := httptest.NewRecorder()
		if b.mux.ServeHTTP(w, httptest.NewRequest("GET", PathFirmware+c.path, nil)); w.Code != c.want {
			t.Errorf("%s: %d, want %d", c.path, w.Code, c.want)
		}
	}
}

func TestUnsafeRepliesAreNotSent(t *testing.T) {
	b := newBench(t, fleet.Config{}, func(o *Options) { o.PublicURL = "http://[::1]:8000" })
	// security: D13
	if w := b.do("POST", PathOTA, "{}", map[string]string{"Device-Id": mac}); w.Code != 500 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	d := b.server.Diagnose(mac)
	if len(d.Findings) == 0 || d.Findings[0].Severity != devices.SeverityError {
		t.Errorf("%+v", d)
	}
}

// A listener that other machines cannot reach is an error, except with a proxy or with connected devices.
func TestDiagnoseLoopback(t *testing.T) {
	for name, tc := range map[string]struct {
		url      string
		settings Settings
		connect  bool
		want     devices.Severity
	}{
		"alone":              {"http://192.0.2.1:8000", Settings{}, false, devices.SeverityError},
		"with a proxy":       {"https://devices.example.com", Settings{Proxied: true}, false, devices.SeverityInfo},
		"with a device here": {"http://192.0.2.1:8000", Settings{}, true, devices.SeverityWarning},
	} {
		b := newBench(t, fleet.Config{}, func(o *Options) {
			o.PublicURL, o.Settings = tc.url, tc.settings
			o.Settings.DeviceListen = "127.0.0.1:8000"
		})
		if tc.connect {
			devicetest.Connect(t, b.server.opt.Service, mac, devicetest.NewScript())
		}
		var got []devices.Finding
		for _, f := range b.server.Diagnose("").Findings {
			if f.Setting == "--device-listen" {
				got = append(got, f)
			}
		}
		if len(got) != 1 || got[0].Severity != tc.want {
			t.Errorf("%s: %+v, want one %s", name, got, tc.want)
		}
	}
}

func TestDiagnoseChangesNothing(t *testing.T) {
	b := newBench(t, fleet.Config{Approve: true}, nil)
	if d := b.server.Diagnose(mac); d.Status != 200 || !json.Valid(d.Reply) {
		t.Errorf("%+v", d)
	}
	if d, _, _, _ := b.Of(mac); d.ID != "" {
		t.Error("the diagnosis created a device")
	}
}
