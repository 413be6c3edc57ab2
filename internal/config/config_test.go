package config

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
)

// flags and env keep the tables below short.
type (
	flags = map[string]string
	env   = []string
)

func mustLoad(t *testing.T, f flags, e env) *Config {
	t.Helper()
	c, err := Load(f, e)
	if err != nil {
		t.Fatalf("Load(%v, %v): %v", f, e, err)
	}
	return c
}

func TestDefaults(t *testing.T) {
	c := mustLoad(t, nil, env{"TZ=Asia/Shanghai", "PATH=/bin"})
	if !regexp.MustCompile(`^n-[a-z2-7]{6}$`).MatchString(c.Node) {
		t.Errorf("Node = %q, want n- and six characters", c.Node)
	}
	if again := mustLoad(t, nil, nil); again.Node == c.Node {
		t.Errorf("two starts are both called %q", c.Node)
	}
	want := Config{
		DataDir: "./fleetd-data", Database: "sqlite", NATS: "embedded", NATSPrefix: "fleetd.v1", NATSReplicas: 1,
		MQTT: "embedded", DeviceListen: ":8000", MQTTListen: ":1883", MQTTTLSListen: ":8883", UDPListen: ":8884", APIListen: "127.0.0.1:8080",
		DrainWindow: 20 * time.Second, Transport: "mqtt", MQTTKeepalive: 120, GatewayTimeout: 5 * time.Second, WebSocketVersion: 1, WebSocketIdle: "keep", FloodGrace: 10 * time.Second, ProxyProtocol: "off", CallsPerDevice: 1, DeviceTimezone: "Asia/Shanghai",
		DeviceAuth: "token", Admission: "open", APIAuth: "token", Console: true, OAuthCIMD: true, OAuthHosts: []string{"*"}, OTARate: 3000, OTABurst: 5000, NewMembersPerAddress: 60, MembersLimit: 1_000_000,
		UploadMinRate: 2 << 10, PhotoRetention: 168 * time.Hour, PhotoLimit: 10 << 30, EventRetention: 24 * time.Hour, EventLimit: 1 << 30, NotificationLimit: 1 << 30,
		HistoryRetention: 9600 * time.Hour, HistoryPerDevice: 100, CatalogRetention: 168 * time.Hour, AuditRetention: 2160 * time.Hour, CatalogMemory: 128 << 20, RecorderMemory: 64 << 20, FirmwareLimit: 32 << 20, FirmwareStorage: 2 << 30, FirmwareDownloads: 64, ConnectionsPerAddress: 4096,
		Node: c.Node, LogLevel: "info", LogFormat: c.LogFormat,
		given: map[string]bool{},
	}
	if !reflect.DeepEqual(*c, want) {
		t.Errorf("defaults:\n got %+v\nwant %+v", *c, want)
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		t.Errorf("LogFormat = %q, want auto resolved", c.LogFormat)
	}
}

func TestEveryField(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("  0123456789abcdef \n"), 0o600); err != nil {
		t.Fatal(err)
	}
	given := flags{
		"data-dir": "/var/lib/fleetd", "database": "postgres://u:p@db/fleetd", "nats": "nats://a:4222,nats://b:4222",
		"drain-window": "5s", "mqtt": "ssl://u:p@broker:8883", "mqtt-listen": ":2883", "mqtt-tls-listen": ":8883", "udp-listen": ":9884", "public-mqtt": "mqtt.example.com:8883",
		"public-udp": "192.0.2.9:9884", "mqtt-keepalive": "30", "voice-upstream": "ws://voice:8000/xiaozhi/v1/", "gateway-api-listen": ":8007",
		"gateway-signature-key": "Gq7Tz9mKfleet", "gateway-server-secret": "Te1st12134", "gateway-timeout": "3s",
		"vision-url": "https://vision.example.com/v1/", "vision-model": "seer", "vision-key": "sk-1", "upload-min-rate": "4KiB",
		"nats-listen": "", "nats-prefix": "acme.fleet_1", "nats-replicas": "3", "node": "rack-7",
		"device-listen": "0.0.0.0:80", "api-listen": "[::1]:9090", "public-host": "devices.example.com",
		"public-device-url": "https://devices.example.com/fleet/", "api-tls-cert": "a.pem", "api-tls-key": "ak.pem", "device-tls-cert": "c.pem", "device-tls-key": "k.pem",
		"trusted-proxies": "10.1.2.3/8, 192.0.2.7,2001:db8::/32",
		"transport":       "websocket", "websocket-version": "3", "websocket-idle": "close", "flood-grace": "30s", "proxy-protocol": "on", "calls-per-device": "16",
		"timezone": "Europe/Berlin", "ota-rate": "0", "ota-burst": "7", "new-members-per-address": "3", "members-limit": "5",
		"device-auth": "none", "admission": "approve", "api-auth": "token", "secret-file": secret,
		"photo-retention": "90m", "photo-limit": "512MiB", "event-retention": "36h", "event-limit": "1048576", "notification-limit": "2MiB",
		"history-retention": "720h", "history-per-device": "7", "catalog-retention": "48h", "audit-retention": "96h", "policy-file": "policy.json", "webhook-allow": "10.0.0.0/8, 192.0.2.7,hooks.example.com", "catalog-memory": "32MiB", "recorder-memory": "8MiB", "firmware-limit": "16MiB", "firmware-storage": "3GiB", "firmware-downloads": "8", "firmware-keys": "keys.pub", "connections-per-address": "9",
		"mcp-hosts": "fleet.example.com, node-7", "mcp-origins": "https://console.example.com", "console": "false",
		"public-api-url": "https://public.example.com", "oauth": "true", "oauth-cimd": "false", "oauth-hosts": "claude.ai, *.openai.com", "mcp-listen": ":8090",
		"log-level": "debug", "log-format": "json",
	}
	c := mustLoad(t, given, nil)
	want := Config{
		DataDir: "/var/lib/fleetd", Database: "postgres://u:p@db/fleetd", NATS: "nats://a:4222,nats://b:4222",
		DrainWindow: 5 * time.Second, MQTT: "ssl://u:p@broker:8883", MQTTListen: ":2883", MQTTTLSListen: ":8883", UDPListen: ":9884", PublicMQTT: "mqtt.example.com:8883",
		PublicUDP: "192.0.2.9:9884", MQTTKeepalive: 30, VoiceUpstream: "ws://voice:8000/xiaozhi/v1/", GatewayAPIListen: ":8007",
		GatewaySignatureKey: "Gq7Tz9mKfleet", GatewayServerSecret: "Te1st12134", GatewayTimeout: 3 * time.Second,
		VisionURL: "https://vision.example.com/v1", VisionModel: "seer", VisionKey: "sk-1", UploadMinRate: 4 << 10,
		NATSPrefix: "acme.fleet_1", NATSReplicas: 3, Node: "rack-7",
		DeviceListen: "0.0.0.0:80", APIListen: "[::1]:9090", PublicHost: "devices.example.com",
		PublicDeviceURL: "https://devices.example.com/fleet", APITLSCert: "a.pem", APITLSKey: "ak.pem", DeviceTLSCert: "c.pem", DeviceTLSKey: "k.pem",
		TrustedProxies: []netip.Prefix{
			netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("192.0.2.7/32"), netip.MustParsePrefix("2001:db8::/32"),
		},
		Transport: "websocket", WebSocketVersion: 3, WebSocketIdle: "close", FloodGrace: 30 * time.Second, ProxyProtocol: "on", CallsPerDevice: 16, Timezone: "Europe/Berlin", DeviceTimezone: "Europe/Berlin",
		DeviceAuth: "none", Admission: "approve", APIAuth: "token", Secret: "0123456789abcdef", SecretFile: secret, OTABurst: 7, NewMembersPerAddress: 3, MembersLimit: 5,
		PhotoRetention: 90 * time.Minute, PhotoLimit: 512 << 20, EventRetention: 36 * time.Hour, EventLimit: 1 << 20, NotificationLimit: 2 << 20,
		HistoryRetention: 720 * time.Hour, HistoryPerDevice: 7, CatalogRetention: 48 * time.Hour, AuditRetention: 96 * time.Hour, PolicyFile: "policy.json", WebhookAllow: []string{"10.0.0.0/8", "192.0.2.7", "hooks.example.com"}, CatalogMemory: 32 << 20, RecorderMemory: 8 << 20, FirmwareLimit: 16 << 20, FirmwareStorage: 3 << 30, FirmwareDownloads: 8, FirmwareKeys: "keys.pub", ConnectionsPerAddress: 9,
		MCPHosts: []string{"fleet.example.com", "node-7", "public.example.com"}, PublicAPIURL: "https://public.example.com", OAuth: true, OAuthHosts: []string{"claude.ai", "*.openai.com"}, MCPListen: ":8090", MCPOrigins: []string{"https://console.example.com"},
		LogLevel: "debug", LogFormat: "json",
		given: c.given,
	}
	if !reflect.DeepEqual(*c, want) {
		t.Errorf("got  %+v\nwant %+v", *c, want)
	}
	for _, f := range Flags() {
		if f.Name != "secret" && !c.Given(f.Name) {
			t.Errorf("Given(%q) = false", f.Name)
		}
	}
}

func TestPrecedence(t *testing.T) {
	cases := []struct {
		name  string
		flags flags
		env   env
		want  string
		given bool
	}{
		{"default", nil, nil, ":8000", false},
		{"environment", nil, env{"FLEETD_DEVICE_LISTEN=:81"}, ":81", true},
		{"flag", flags{"device-listen": ":82"}, nil, ":82", true},
		{"flag wins", flags{"device-listen": ":82"}, env{"FLEETD_DEVICE_LISTEN=:81"}, ":82", true},
		{"flag wins over a wrong variable", flags{"device-listen": ":82"}, env{"FLEETD_DEVICE_LISTEN=nonsense"}, ":82", true},
		{"flag with the default's value is given", flags{"device-listen": ":8000"}, nil, ":8000", true},
		{"empty variable is not given", nil, env{"FLEETD_DEVICE_LISTEN="}, ":8000", false},
		{"later entry holds", nil, env{"FLEETD_DEVICE_LISTEN=:81", "FLEETD_DEVICE_LISTEN=:83"}, ":83", true},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			c := mustLoad(t, tc.flags, tc.env)
			if c.DeviceListen != tc.want || c.Given("device-listen") != tc.given {
				t.Errorf("DeviceListen = %q, Given = %v; want %q, %v", c.DeviceListen, c.Given("device-listen"), tc.want, tc.given)
			}
		})
	}
	if new(Config).Given("device-listen") {
		t.Error("a zero Config reports a setting as given")
	}
}

func TestUnknownVariables(t *testing.T) {
	cases := []struct{ variable, nearest string }{
		{"FLEETD_DEVICE_LISTN=:1", "FLEETD_DEVICE_LISTEN"},
		{"FLEETD_DATADIR=/x", "FLEETD_DATA_DIR"},
		{"FLEETD_LOGLEVEL=debug", "FLEETD_LOG_LEVEL"},
		{"FLEETD_TOKN=0123456789abcdef", "FLEETD_TOKEN"},
		{"FLEETD_SECRT=hunter2hunter2hunter2", "FLEETD_SECRET"},
		{"FLEETD_UNKNOWN_EMPTY=", ""},
	}
	for _, tc := range cases {
		_, err := Load(nil, env{tc.variable})
		name, value, _ := strings.Cut(tc.variable, "=")
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "nearest one is "+tc.nearest) {
			t.Errorf("%s: %v, want a sentence naming %s", tc.variable, err, tc.nearest)
		} else if value != "" && len(value) > 8 && strings.Contains(err.Error(), value) {
			t.Errorf("%s: the sentence repeats the value: %v", tc.variable, err)
		}
	}
	mustLoad(t, nil, env{
		"FLEETD_TEST_POSTGRES=x", "FLEETD_API=http://x", "FLEETD_TOKEN=x", "FLEETD_SERVICE_HOST=10.0.0.1",
		"FLEETD_PORT=tcp://10.0.0.1:8080", "FLEETD_PORT_8080_TCP_ADDR=10.0.0.1", "OTHER_DATADIR=x", "FLEETDX=1",
	})
	if _, err := Load(flags{"unknown": "1"}, nil); err == nil || !strings.Contains(err.Error(), "--unknown") {
		t.Errorf("unknown flag: %v", err)
	}
}

func TestDistance(t *testing.T) {
	cases := []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"kitten", "sitting", 3}, {"flaw", "lawn", 2}, {"same", "same", 0}, {"ab", "ba", 1}, {"time", "itme", 1}}
	for _, tc := range cases {
		if got := Distance(tc.a, tc.b); got != tc.want {
			t.Errorf("Distance(%q, %q) = %d, want %d", tc.a, tc.b, got, tc.want)
		}
	}
}

func TestSystemTimezone(t *testing.T) {
	cases := []struct{ tz, want string }{
		{"Europe/Berlin", "Europe/Berlin"}, {":Europe/Berlin", "Europe/Berlin"},
		{"/usr/share/zoneinfo/Asia/Tokyo", "Asia/Tokyo"}, {"", "UTC"}, {"Mars/Olympus", "UTC"}, {"Local", "UTC"},
	}
	for _, tc := range cases {
		if got := systemTimezone(env{"TZ=" + tc.tz}); got != tc.want {
			t.Errorf("TZ=%q: %q, want %q", tc.tz, got, tc.want)
		}
	}
	if _, err := time.LoadLocation(systemTimezone(nil)); err != nil {
		t.Errorf("the machine's own zone: %v", err)
	}
}

func TestFlags(t *testing.T) {
	seen := make(map[string]bool)
	var groups []string
	for _, f := range Flags() {
		if seen[f.Name] {
			t.Errorf("%s is there twice", f.Name)
		}
		seen[f.Name] = true
		if f.Help == "" || !strings.HasSuffix(f.Help, ".") {
			t.Errorf("%s: help %q is not a sentence", f.Name, f.Help)
		}
		if want := "FLEETD_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_")); f.Env != want {
			t.Errorf("%s: variable %s, want %s", f.Name, f.Env, want)
		}
		if isIgnored(f.Env) {
			t.Errorf("%s: its variable %s is one of those ignored", f.Name, f.Env)
		}
		if len(groups) == 0 || groups[len(groups)-1] != f.Group {
			groups = append(groups, f.Group)
		}
	}
	for i, g := range groups {
		for _, other := range groups[i+1:] {
			if g == other {
				t.Errorf("group %s is torn apart", g)
			}
		}
	}
}

func TestLoadClient(t *testing.T) {
	all := env{"FLEETD_DATA_DIR=/d", "FLEETD_API=http://a", "FLEETD_TOKEN=t"}
	cases := []struct {
		name  string
		flags Client
		env   env
		want  Client
	}{
		{"defaults", Client{}, nil, Client{DataDir: "./fleetd-data"}},
		{"environment", Client{}, all, Client{DataDir: "/d", API: "http://a", Token: "t"}},
		{"flags win", Client{DataDir: "/f", API: "http://f", Token: "f"}, all, Client{DataDir: "/f", API: "http://f", Token: "f"}},
		{"a client ignores unknown names", Client{}, env{"FLEETD_NOPE=1"}, Client{DataDir: "./fleetd-data"}},
	}
	for _, tc := range cases {
		if got := LoadClient(tc.flags, tc.env); got != tc.want {
			t.Errorf("%s: %+v, want %+v", tc.name, got, tc.want)
		}
	}
}
