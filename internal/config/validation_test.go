package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRefused(t *testing.T) {
	cases := []struct {
		flag, value string
		want        string // the sentence after "--flag (FLEETD_FLAG) "
	}{
		{"data-dir", "", `must not be empty`},
		{"database", "mysql://u:hunter2@h/d", `must be sqlite, sqlite:PATH or a URL such as postgres://user:password@host:5432/fleetd`},
		{"database", "sqlite:", `must be sqlite, sqlite:PATH or a URL`},
		{"database", "postgres://", `must be sqlite, sqlite:PATH or a URL`},
		{"database", "postgres://u:hunter2@h:x/d", `must be sqlite, sqlite:PATH or a URL`},
		{"nats", "http://u:hunter2@a:4222", `must be embedded or a comma-separated list of URLs such as nats://host:4222`},
		{"nats", "nats://a:4222,", `must be embedded or`},
		{"nats", "off", `must be embedded or`},
		{"nats-listen", "4222", `is "4222" but must be host:port or :port, with a port from 0 to 65535`},
		{"nats-prefix", "", `must be one to five words`},
		{"nats-prefix", "a.b.c.d.e.f", `is "a.b.c.d.e.f" but must be one to five words of letters, digits, _ and - joined by dots`},
		{"nats-prefix", "a..b", `must be one to five words`},
		{"nats-prefix", "a.>", `must be one to five words`},
		{"node", "two words", `is "two words" but must be up to 64 letters, digits, _ and -`},
		{"event-retention", "20", `is "20" but must be a duration such as 90s, 15m or 7d, from 1m to 3650d`},
		{"event-retention", "-1s", `must be a duration`},
		{"history-retention", "23h", `from 1d to 3650d`},
		{"history-per-device", "0", `must be a whole number from 1 to 10000`},
		{"catalog-retention", "1h", `from 1d to 3650d`},
		{"catalog-memory", "1MiB", `at least 16384KiB`},
		{"recorder-memory", "512KiB", `at least 1024KiB, or 0`},
		{"device-listen", "", `must be host:port or :port`},
		{"device-listen", ":65536", `is ":65536" but must be host:port or :port`},
		{"device-listen", "a b:80", `must be host:port or :port`},
		{"console", "off", `is "off" but must be true or false`},
		{"api-listen", "localhost", `is "localhost" but must be host:port or :port`},
		{"public-host", "http://h", `is "http://h" but must be an IPv4 address or a host name without scheme, port or path`},
		{"public-host", "h:8000", `must be an IPv4 address or a host name`},
		{"public-host", "::1", `must be an IPv4 address or a host name`},
		{"public-host", "300.1.1.1", `must be an IPv4 address or a host name`},
		{"public-device-url", "devices.example.com", `is "devices.example.com" but must be http://host[:port][/path]`},
		{"public-device-url", "ws://h", `must be http://host[:port]`},
		{"public-device-url", "http://[::1]:80", `must be http://host[:port]`},
		{"public-device-url", "http://h/a:b", `must be http://host[:port]`},
		{"public-device-url", "http://h/a%3Ab", `must be http://host[:port]`},
		{"public-device-url", "http://h/?x=1", `must be http://host[:port]`},
		{"public-device-url", "http://h/?", `must be http://host[:port]`},
		{"public-device-url", "http://h/#", `must be http://host[:port]`},
		{"public-device-url", "http://h:0", `must be http://host[:port]`},
		{"public-device-url", "http://h:", `must be http://host[:port]`},
		{"public-device-url", "http://", `must be http://host[:port]`},
		{"public-device-url", "http://u:hunter2@h", `must be http://host[:port]`},
		{"trusted-proxies", "10.0.0.0/33", `is "10.0.0.0/33" but must be comma-separated networks or addresses such as 10.0.0.0/8,192.0.2.7`},
		{"trusted-proxies", "10.0.0.0/8,,", `must be comma-separated networks`},
		{"transport", "udp", `is "udp" but must be mqtt or websocket`},
		{"mqtt", "mqtt://broker", `must be embedded, off, or a URL such as tcp://user:password@broker:1883 or ssl://broker:8883`},
		{"public-mqtt", "mqtt://h:1883", `is "mqtt://h:1883" but must be host or host:port without a scheme`},
		{"public-mqtt", "h:0", `must be host or host:port`},
		{"public-udp", "h", `must be host:port`},
		{"mqtt-keepalive", "5", `must be a whole number from 10 to 3600`},
		{"voice-upstream", "http://h/", `must be a URL such as ws://host:8000/xiaozhi/v1/`},
		{"gateway-timeout", "0s", `must be a duration`},
		{"websocket-version", "4", `is "4" but must be a whole number from 1 to 3`},
		{"websocket-version", "one", `must be a whole number from 1 to 3`},
		{"websocket-idle", "drop", `is "drop" but must be keep or close`},
		{"calls-per-device", "0", `is "0" but must be a whole number from 1 to 16`},
		{"calls-per-device", "17", `must be a whole number from 1 to 16`},
		{"timezone", "Mars/Olympus", `is "Mars/Olympus" but must be the IANA name of a time zone such as Europe/Berlin or UTC`},
		{"timezone", "Local", `must be the IANA name`},
		{"ota-rate", "-1", `is "-1" but must be a whole number from 0 to 10000000`},
		{"ota-burst", "0", `is "0" but must be a whole number from 1 to 10000000`},
		{"device-auth", "basic", `is "basic" but must be token or none`},
		{"admission", "closed", `is "closed" but must be open or approve`},
		{"api-auth", "off", `is "off" but must be token or none`},
		{"secret", "hunter2", `needs at least 16 characters and has 7`},
		{"secret", "                 ", `needs at least 16 characters and has 0`},
		{"photo-retention", "0s", `is "0s" but must be a duration such as 90s, 15m or 7d, from 1m to 3650d`},
		{"photo-limit", "10GB", `is "10GB" but must be a size such as 512MiB or 10GiB, at least 1024KiB`},
		{"photo-limit", "1KiB", `must be a size`},
		{"photo-limit", "9999999999GiB", `must be a size`},
		{"photo-limit", "99999999999999999999", `must be a size`},
		{"event-retention", "forever", `must be a duration`},
		{"event-limit", "-1", `must be a size`},
		{"notification-limit", "1KiB", `must be a size`},
		{"vision-url", "vision.example.com", `must be a URL such as https://api.openai.com/v1`},
		{"vision-url", "https://u:hunter2@h/v1", `without a user`},
		{"vision-url", "https://h/v1/chat/completions", `which is appended`},
		{"vision-key", "hunter2\nX: y", `must be one line of printable ASCII`},
		{"vision-model", "sée", `must be one line of printable ASCII`},
		{"log-level", "trace", `is "trace" but must be debug, info, warn or error`},
		{"log-format", "xml", `is "xml" but must be auto, text or json`},
	}
	for _, tc := range cases {
		t.Run(tc.flag+"="+tc.value, func(t *testing.T) {
			_, err := Load(flags{tc.flag: tc.value}, nil)
			if err == nil {
				t.Fatal("accepted")
			}
			if got := err.Error(); !strings.HasPrefix(got, mention(tc.flag)+" ") || !strings.Contains(got, tc.want) {
				t.Errorf("got  %s\nwant %s ... %s", got, mention(tc.flag), tc.want)
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the sentence holds the password: %v", err)
			}
			if tc.value == "" {
				return // an empty variable counts as not set
			}
			_, fromEnv := Load(nil, env{envName(tc.flag) + "=" + tc.value})
			if fromEnv == nil || fromEnv.Error() != err.Error() {
				t.Errorf("the environment gives %v, the flag %v", fromEnv, err)
			}
		})
	}
}

func TestRefusedTogether(t *testing.T) {
	dir := t.TempDir()
	short := filepath.Join(dir, "short")
	if err := os.WriteFile(short, []byte("hunter2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name  string
		flags flags
		want  string
	}{
		{"open API", flags{"api-auth": "none", "api-listen": ":8080"}, `--api-auth (FLEETD_API_AUTH) may be none only while --api-listen (FLEETD_API_LISTEN) is a loopback address such as 127.0.0.1:8080, not ":8080"`},
		{"open API on a LAN", flags{"api-auth": "none", "api-listen": "192.0.2.1:8080"}, `may be none only while`},
		{"two secrets", flags{"secret": "0123456789abcdef", "secret-file": short}, `--secret (FLEETD_SECRET) and --secret-file (FLEETD_SECRET_FILE) are two ways to give the same key`},
		{"a key for nobody", flags{"vision-key": "hunter2"}, `--vision-key (FLEETD_VISION_KEY) needs --vision-url (FLEETD_VISION_URL)`},
		{"a model of nobody", flags{"vision-model": "seer"}, `--vision-model (FLEETD_VISION_MODEL) needs --vision-url (FLEETD_VISION_URL)`},
		{"missing file", flags{"secret-file": filepath.Join(dir, "none")}, `--secret-file (FLEETD_SECRET_FILE) cannot be read: open`},
		{"short file", flags{"secret-file": short}, `which holds 7 characters; a secret needs at least 16`},
		{"no key", flags{"device-tls-cert": "c"}, `--device-tls-cert (FLEETD_DEVICE_TLS_CERT) needs --device-tls-key (FLEETD_DEVICE_TLS_KEY) as well`},
		{"no key of the API", flags{"api-tls-cert": "c"}, `--api-tls-cert (FLEETD_API_TLS_CERT) needs --api-tls-key (FLEETD_API_TLS_KEY) as well`},
		{"no certificate", flags{"device-tls-key": "k"}, `--device-tls-key (FLEETD_DEVICE_TLS_KEY) needs --device-tls-cert`},
		{"port of a NATS elsewhere", flags{"nats": "nats://h:4222", "nats-listen": ":4222"}, `--nats-listen (FLEETD_NATS_LISTEN) opens a port of the embedded NATS`},
		{"same port", flags{"device-listen": ":8080"}, `--device-listen (FLEETD_DEVICE_LISTEN) and --api-listen (FLEETD_API_LISTEN) both listen on "127.0.0.1:8080"`},
		{"replicas on one server", flags{"nats-replicas": "3"}, `--nats-replicas (FLEETD_NATS_REPLICAS) is 3, but --nats (FLEETD_NATS) is embedded`},
		{"same address", flags{"api-listen": "127.0.0.1:9", "nats-listen": "127.0.0.1:9"}, `both listen on`},
	}
	for _, tc := range cases {
		_, err := Load(tc.flags, nil)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s:\n got %v\nwant %s", tc.name, err, tc.want)
		} else if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "0123456789abcdef") {
			t.Errorf("%s: the sentence holds the secret: %v", tc.name, err)
		}
	}
}

func TestAccepted(t *testing.T) {
	cases := []flags{
		{"api-auth": "none", "api-listen": "localhost:8080"},
		{"api-auth": "none", "api-listen": "127.8.0.1:8080"},
		{"api-auth": "none", "api-listen": "[::1]:8080"},
		{"device-listen": ":0", "api-listen": "127.0.0.1:0", "nats-listen": ":0"},
		{"device-listen": "192.0.2.1:8080", "api-listen": "127.0.0.1:8080"},
		{"device-listen": "fleet-1.local:80"},
		{"database": "sqlite:/tmp/x.db"}, {"database": "postgresql:///fleetd?host=/run/postgresql"},
		{"nats": "tls://token@nats.example.com, nats://b"},
		{"public-host": "192.0.2.1"}, {"public-host": "my-mac.local"},
		{"public-device-url": "http://192.0.2.1:8000"}, {"public-device-url": "https://h/a/b.c/"},
		{"nats-prefix": "a.b.c.d.e"}, {"timezone": "UTC"}, {"photo-limit": "2TiB"}, {"trusted-proxies": " "},
	}
	for _, tc := range cases {
		mustLoad(t, tc, nil)
	}
}
