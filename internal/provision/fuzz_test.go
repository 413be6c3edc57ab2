package provision

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// FuzzOTA sends arbitrary requests to the handler. Each is refused, or gets a reply that
// passes Check and contains credentials that the fleet accepts. FuzzOTAToFirmware of the
// simulator passes replies on to the device.
func FuzzOTA(f *testing.F) {
	f.Add([]byte(`{"board":{"name":"x","ssid":"a"b"}}`), "aa:bb:cc:dd:ee:ff", "c", "x/1.0", false)
	f.Add([]byte(`{"uuid":"u","mac_address":"aa:bb:cc:dd:ee:ff","application":{"version":"2.4.2"}}`), "", "", "", true)
	f.Add([]byte(`{"uuid":"a\u0000b"}`), "robot-1", "", "", true)
	f.Add([]byte(`{"uuid":"\ud83d"}`), "robot-1", "", "board/2.0", true)
	f.Add([]byte{}, "robot-1", "\xff", "", true)
	f.Fuzz(func(t *testing.T, body []byte, id, client, agent string, mqtt bool) {
		b := newBench(t, fleet.Config{}, func(o *Options) {
			if mqtt {
				o.MQTT, o.Transport = &MQTT{Endpoint: "192.0.2.1:1883", Keepalive: 240}, devices.TransportMQTT
			}
		})
		r := httptest.NewRequest(http.MethodPost, PathOTA, bytes.NewReader(body))
		r.Header.Set("Device-Id", id)
		r.Header.Set("Client-Id", client)
		r.Header.Set("User-Agent", agent)
		w := httptest.NewRecorder()
		b.mux.ServeHTTP(w, r)
		if w.Code == http.StatusBadRequest {
			return
		}
		if err := Check(w.Body.Bytes()); w.Code != http.StatusOK || err != nil {
			t.Fatalf("%d %s: %v", w.Code, w.Body, err)
		}
		var got struct {
			MQTT *struct {
				ClientID           string `json:"client_id"`
				Username, Password string
			}
			WebSocket *struct{ Token string }
		}
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || (got.MQTT == nil) == (got.WebSocket == nil) {
			t.Fatalf("%s: %v", w.Body, err)
		}
		devicesOf := b.Ports.Devices()
		if len(devicesOf) != 1 {
			t.Fatalf("%d devices", len(devicesOf))
		}
		for device, row := range devicesOf {
			if _, err := devices.ParseID(string(device)); err != nil || !utf8.ValidString(row.Board+row.Firmware+row.ELF+row.Chip) {
				t.Errorf("%+v: %v", row, err)
			}
			name, token := row.ClientID, ""
			if got.WebSocket != nil {
				token = got.WebSocket.Token
			} else {
				var marked bool
				name, marked = credential.ClientOfUser(got.MQTT.Username)
				if token = got.MQTT.Password; !marked || got.MQTT.ClientID != device.Token() {
					t.Errorf("%s: %s", device, w.Body)
				}
			}
			if !b.mint.IsDevice(token, string(device), name, 0) {
				t.Errorf("%q of client %q cannot log in with %s", device, name, w.Body)
			}
		}
	})
}

// Texts of a reply that every firmware parses as intended.
var (
	safeWebSocket = regexp.MustCompile(`^wss?://[^/:?#@\[\]]+(:[0-9]{1,5})?(/[^:]*)?$`)
	safeFirmware  = regexp.MustCompile(`^(https?://[^/:?#@\[\]]+(:[0-9]{1,5})?(/[^:]*)?)?$`)
	safeVersion   = regexp.MustCompile(`^[0-9]{1,10}(\.[0-9]{1,10})*$`)
)

// FuzzCheck parses replies that pass Check with encoding/json, with names in lower case,
// because the firmware ignores their case.
func FuzzCheck(f *testing.F) {
	for _, reply := range []string{`{"websocket":{"url":"ws://192.0.2.1:8000/","token":"","version":1}}`,
		`{"mqtt":{"endpoint":"192.0.2.1:1883","client_id":"a","keepalive":240,"subscribe_topic":"b"},"server_time":{"timestamp":1786150000000,"timezone_offset":480}}`,
		`{"firmware":{"version":"2.4.2","url":"http://192.0.2.5/f.bin","force":1}}`, `{"MQTT":{"sixteen_chars_xx":"v"}}`, `{"websocket":{"url":"wss://h:/"}}`,
		`{"mqtt":{"endpoint":"h\u0000:1"}}`, `{"a":{"b":"\ud83d\\u0000"}}`} {
		f.Add([]byte(reply))
	}
	f.Fuzz(func(t *testing.T, reply []byte) {
		if Check(reply) != nil {
			return
		}
		var sections map[string]map[string]any
		d := json.NewDecoder(bytes.NewReader(reply))
		d.UseNumber()
		if err := d.Decode(&sections); err != nil || !json.Valid(reply) || len(reply) > MaxReply {
			t.Fatalf("%q passes: %v", reply, err)
		}
		transports := 0
		for name, section := range sections {
			name = strings.ToLower(name)
			stored := name == "mqtt" || name == "websocket"
			if stored {
				transports++
			}
			for key, value := range section {
				text, isText := value.(string)
				_, isNumber := value.(json.Number)
				safe := !strings.ContainsRune(key+text, 0) && len(text) < MaxString && (!stored || len(key) <= MaxKey)
				switch name + "." + strings.ToLower(key) {
				case "mqtt.endpoint":
					host, port, err := net.SplitHostPort(text)
					safe = safe && err == nil && host != "" && port != ""
				case "websocket.url":
					safe = safe && safeWebSocket.MatchString(text)
				case "firmware.url":
					safe = safe && safeFirmware.MatchString(text)
				case "firmware.version":
					safe = safe && safeVersion.MatchString(text)
				case "websocket.version", "mqtt.keepalive", "firmware.force":
					safe = safe && isNumber && !isText
				}
				if !safe {
					t.Errorf("%q passes with %s.%s", reply, name, key)
				}
			}
		}
		if transports > 1 {
			t.Errorf("%q passes with both transports", reply)
		}
	})
}
