package config

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

const (
	defaultDataDir = "./fleetd-data"
	minSecret      = 16

	kib = 1 << 10
	mib = 1 << 20
)

// The groups of `fleetd serve --help`, in the order of the table.
const (
	groupNode    = "Node"
	groupListen  = "Addresses"
	groupDevices = "Devices"
	groupVoice   = "Voice and gateway"
	groupVision  = "Vision"
	groupAccess  = "Access"
	groupKeep    = "Retention"
	groupLog     = "Logs"
)

// Config holds the settings of one node, each as its entry in [settings] describes it. It is complete and valid once
// [Load] returned it, and nothing changes it afterwards, except that the command sets Version; it is then safe for
// concurrent use. It contains secrets: do not print it.
type Config struct {
	DataDir      string
	Database     string
	NATS         string
	NATSListen   string
	NATSPrefix   string
	NATSReplicas int
	MQTT         string
	DrainWindow  time.Duration
	Node         string

	DeviceListen          string
	MQTTListen            string
	MQTTTLSListen         string
	UDPListen             string
	APIListen             string
	PublicHost            string
	PublicDeviceURL       string
	PublicMQTT            string
	PublicUDP             string
	DeviceTLSCert         string
	DeviceTLSKey          string
	APITLSCert            string
	APITLSKey             string
	TrustedProxies        []netip.Prefix
	ProxyProtocol         string
	ConnectionsPerAddress int
	FloodGrace            time.Duration

	Transport            string
	MQTTKeepalive        int // seconds
	WebSocketVersion     int
	WebSocketIdle        string
	CallsPerDevice       int
	Timezone             string // empty: that of jobs is UTC, since the nodes of a fleet may differ in the system's
	DeviceTimezone       string // Timezone, or the system's
	OTARate              int    // per minute
	OTABurst             int
	NewMembersPerAddress int // per minute
	MembersLimit         int

	DeviceAuth string
	Admission  string
	APIAuth    string
	Console    bool
	MCPHosts   []string
	MCPOrigins []string
	// PublicAPIURL is the address under which hosts reach MCP; empty: hosts cannot log in.
	PublicAPIURL string
	OAuth        bool // the authorization server; false without PublicAPIURL
	OAuthCIMD    bool
	OAuthHosts   []string
	MCPListen    string
	Secret       string // of --secret or --secret-file, without surrounding white space
	SecretFile   string
	PolicyFile   string
	// WebhookAllow are networks and names of hosts to which webhooks may connect beside public addresses.
	WebhookAllow []string
	FirmwareKeys string // path

	VoiceUpstream       string
	GatewayAPIListen    string
	GatewaySignatureKey string
	GatewayServerSecret string
	GatewayTimeout      time.Duration

	VisionURL     string
	VisionModel   string
	VisionKey     string
	UploadMinRate int64 // bytes per second

	PhotoRetention    time.Duration
	PhotoLimit        int64 // bytes
	EventRetention    time.Duration
	EventLimit        int64 // bytes
	NotificationLimit int64 // bytes
	HistoryRetention  time.Duration
	HistoryPerDevice  int
	CatalogRetention  time.Duration
	AuditRetention    time.Duration
	CatalogMemory     int64 // bytes
	RecorderMemory    int64 // bytes; 0: off
	FirmwareLimit     int64 // bytes
	FirmwareStorage   int64 // bytes
	FirmwareDownloads int

	LogLevel  string
	LogFormat string

	// Version is the version of the program, set by the command that runs the node.
	Version string

	given map[string]bool
}

// setting is one line of the table. Its set function checks a value and stores it; its error completes the sentence
// "--flag (FLEETD_FLAG) ..." and does not repeat the value.
type setting struct {
	name  string
	group string
	def   string
	help  string
	// more is what the reference adds to the help: Markdown, with links from docs/reference.
	more string
	// private values never appear in an error: they may hold a password.
	private bool
	set     func(*Config, string) error
}

// settings is the one table of everything that can be configured.
var settings = []setting{
	{name: "data-dir", group: groupNode, def: defaultDataDir,
		help: "Everything the node writes; locked while in use.",
		more: "One node per directory.",
		set:  text(func(c *Config) *string { return &c.DataDir })},
	{name: "database", group: groupNode, def: "sqlite", private: true,
		help: "sqlite (a file in the data dir), sqlite:PATH, or postgres://...",
		more: "See [database](../data.md#database).",
		set:  checked(func(c *Config) *string { return &c.Database }, checkDatabase)},
	{name: "nats", group: groupNode, def: "embedded", private: true,
		help: "embedded, or nats://...[,nats://...].",
		more: "`tls://` works too. An external server needs JetStream.",
		set:  checked(func(c *Config) *string { return &c.NATS }, checkNATS)},
	{name: "nats-listen", group: groupNode, def: "",
		help: "Client port of the embedded NATS, so that other programs can attach, as host:port; empty: in-process only.",
		more: "Without a password on loopback; elsewhere with a token: [an API key](../events.md#attaching-to-nats) or the admin token.",
		set:  optional(func(c *Config) *string { return &c.NATSListen }, checkListen)},
	{name: "nats-prefix", group: groupNode, def: "fleetd.v1",
		help: "Root of all subjects and, upper-cased with _, of stream names.",
		more: "Two fleets on one NATS need two prefixes, which differ in more than case, dots and underscores.",
		set:  checked(func(c *Config) *string { return &c.NATSPrefix }, checkPrefix)},
	{name: "nats-replicas", group: groupNode, def: "1",
		help: "Servers of an external NATS cluster that hold each event and photo, 1 to 5; 3 survives the loss of one. The same on every node.",
		set:  integer(func(c *Config) *int { return &c.NATSReplicas }, 1, 5)},
	{name: "mqtt", group: groupNode, def: "embedded", private: true,
		help: "embedded, off, or tcp:// or ssl:// URL of a broker that subscribes on the devices' behalf (one node; see docs/howto/emqx.md).",
		more: "With `off`, `--transport` is `websocket`.",
		set:  checked(func(c *Config) *string { return &c.MQTT }, checkMQTT)},
	{name: "drain-window", group: groupNode, def: "20s",
		help: "Time in which a stopping node lets downloads of firmware and the tasks of jobs that it runs end, and then closes its devices' sessions one after the other, so that they reconnect to other nodes; without running tasks and another node they end at once.",
		set:  duration(func(c *Config) *time.Duration { return &c.DrainWindow }, 0, 5*time.Minute)},
	{name: "node", group: groupNode, def: "",
		help: "Node name in logs, metrics and answers; empty: random per start.",
		more: "Give it one if you collect metrics: up to 64 letters, digits, `_`, `-`.",
		set:  optional(func(c *Config) *string { return &c.Node }, checkNode)},

	{name: "device-listen", group: groupListen, def: ":8000",
		help: "HTTP for devices: OTA, WebSocket, photos.",
		set:  checked(func(c *Config) *string { return &c.DeviceListen }, checkListen)},
	{name: "mqtt-listen", group: groupListen, def: ":1883",
		help: "MQTT for devices.",
		set:  checked(func(c *Config) *string { return &c.MQTTListen }, checkListen)},
	{name: "mqtt-tls-listen", group: groupListen, def: ":8883",
		help: "MQTT over TLS, open when a certificate is given; devices use TLS at port 8883 and at no other.",
		set:  checked(func(c *Config) *string { return &c.MQTTTLSListen }, checkListen)},
	{name: "udp-listen", group: groupListen, def: ":8884",
		help: "UDP audio of MQTT devices.",
		more: "On a host with several addresses, answers leave from the address that the device sends to (on Linux; on other systems listen on that address).",
		set:  checked(func(c *Config) *string { return &c.UDPListen }, checkListen)},
	{name: "api-listen", group: groupListen, def: "127.0.0.1:8080",
		help: "REST, events, MCP, metrics, pprof: the internal side.",
		set:  checked(func(c *Config) *string { return &c.APIListen }, checkListen)},
	{name: "public-host", group: groupListen, def: "",
		help: "Host that devices dial; empty: the first non-loopback IPv4 address.",
		more: "An IPv4 address or a name, no port: the firmware cannot dial IPv6 literals. **Set it in containers, with NAT, and on machines with several addresses.**",
		set:  optional(func(c *Config) *string { return &c.PublicHost }, checkPublicHost)},
	{name: "public-device-url", group: groupListen, def: "",
		help: "URL under which devices reach the device listener through a reverse proxy, such as https://devices.example.com; empty: the public host and the listener's port.",
		more: "It replaces `--public-host` for HTTP and WebSocket, **not for MQTT and UDP**: give those as well.",
		set: func(c *Config, value string) error {
			c.PublicDeviceURL = strings.TrimRight(value, "/")
			if value == "" {
				return nil
			}
			return checkPublicURL(c.PublicDeviceURL)
		}},
	{name: "public-mqtt", group: groupListen, def: "",
		help: "host[:port] that devices dial for MQTT; empty: the public host and the listener's port.",
		set:  optional(func(c *Config) *string { return &c.PublicMQTT }, checkPublicMQTT)},
	{name: "public-udp", group: groupListen, def: "",
		help: "host:port that devices send audio to, of this very node: UDP is never balanced; empty: the public host and the listener's port.",
		set:  optional(func(c *Config) *string { return &c.PublicUDP }, checkPublicUDP)},
	{name: "device-tls-cert", group: groupListen, def: "",
		help: "Certificate chain (PEM file) of the device and MQTT listeners; devices trust public certificate authorities only.",
		more: "Read again when it changes and at SIGHUP. See [TLS](../howto/tls.md).",
		set:  optional(func(c *Config) *string { return &c.DeviceTLSCert }, nil)},
	{name: "device-tls-key", group: groupListen, def: "",
		help: "Private key (PEM file) for the certificate.",
		set:  optional(func(c *Config) *string { return &c.DeviceTLSKey }, nil)},
	{name: "mcp-listen", group: groupListen, def: "",
		help: "Address of a listener with MCP and the login of hosts alone, such as :8090, for the public name; empty: none.",
		more: "It has /mcp and below, /sse, /.well-known/oauth-*, /oauth/* and /livez. See [hosts that log in](../mcp.md#hosts-that-log-in).",
		set:  optional(func(c *Config) *string { return &c.MCPListen }, checkListen)},
	{name: "api-tls-cert", group: groupListen, def: "",
		help: "Certificate chain (PEM file) of the API listener, read again when it changes; empty: plain HTTP.",
		more: "Also read again at SIGHUP. Commands on the node's machine compare the certificate with the file, whatever names it has.",
		set:  optional(func(c *Config) *string { return &c.APITLSCert }, nil)},
	{name: "api-tls-key", group: groupListen, def: "",
		help: "Private key (PEM file) for the API's certificate.",
		set:  optional(func(c *Config) *string { return &c.APITLSKey }, nil)},
	{name: "trusted-proxies", group: groupListen, def: "",
		help: "Networks (CIDR, comma-separated) of proxies: their X-Forwarded-For is used, and their own connections have no limit per address.",
		set:  setProxies},
	{name: "proxy-protocol", group: groupListen, def: "off",
		help: "on: trusted proxies begin each connection to the device and MQTT listeners with a PROXY header (v1 or v2), and those without one are closed; off: they send none.",
		more: "See [a TCP proxy](../howto/reverse-proxy.md#a-tcp-proxy).",
		set:  choice(func(c *Config) *string { return &c.ProxyProtocol }, "off", "on")},
	// A quarter of the 16,384 MQTT connections that may wait to be let in.
	{name: "connections-per-address", group: groupListen, def: "4096",
		help: "Unauthenticated connections of one address (IPv6: one /64) to the devices' ports; authenticated devices do not count; 0: no limit.",
		more: "See [limits](../limits.md).",
		set:  integer(func(c *Config) *int { return &c.ConnectionsPerAddress }, 0, 1_000_000)},
	{name: "flood-grace", group: groupListen, def: "10s",
		help: "How long a device may exceed its rate (20 messages, 50 pings or 1,000 packets of audio a second) before its connection is closed and it is refused for a while.",
		more: "See [limits](../limits.md).",
		set:  duration(func(c *Config) *time.Duration { return &c.FloodGrace }, time.Second, time.Hour)},

	{name: "transport", group: groupDevices, def: "mqtt",
		help: "What the OTA reply offers a device by default: mqtt (always reachable) or websocket (connected around conversations).",
		more: "See [which transport?](../howto/run-a-node.md#which-transport).",
		set:  choice(func(c *Config) *string { return &c.Transport }, "mqtt", "websocket")},
	{name: "mqtt-keepalive", group: groupDevices, def: "120",
		help: "Seconds after which an idle MQTT device sends a PINGREQ, given to devices through OTA, 10 to 3600.",
		more: "After one and a half of them without a packet the device counts as offline.",
		set:  integer(func(c *Config) *int { return &c.MQTTKeepalive }, 10, 3600)},
	{name: "websocket-version", group: groupDevices, def: "1",
		help: "Binary framing that WebSocket devices use: 1, 2 or 3.",
		more: "There is no reason to change it.",
		set:  integer(func(c *Config) *int { return &c.WebSocketVersion }, 1, 3)},
	{name: "websocket-idle", group: groupDevices, def: "keep",
		help: "keep: refresh the device's 120 s clock so that it stays reachable; close: close the socket at 110 s.",
		set:  choice(func(c *Config) *string { return &c.WebSocketIdle }, "keep", "close")},
	{name: "calls-per-device", group: groupDevices, def: "1",
		help: "Tool calls in flight on one device, 1 to 16; 16 more wait.",
		more: "The firmware runs calls one after another in any case.",
		set:  integer(func(c *Config) *int { return &c.CallsPerDevice }, 1, 16)},
	{name: "timezone", group: groupDevices, def: "",
		help: "IANA name of the zone sent to devices, and of jobs without one, such as Europe/Berlin; empty: the system's for devices, UTC for jobs.",
		set:  optional(func(c *Config) *string { return &c.Timezone }, checkTimezone)},
	// A device that is refused tries again after 10, 20, 40 ... 2560 s and gives up after ten attempts (main/ota.cc,
	// main/application.cc:417 of xiaozhi-esp32 v2.4.2), so the limit must let a whole site with one address boot
	// after a power cut. At 3000 a minute and 5000 at once, 5000 devices pass immediately and 10,000 within 150 s.
	{name: "ota-rate", group: groupDevices, def: "3000",
		help: "OTA and activation requests per minute from one client address, so a whole site behind one NAT counts as one; 0: no limit.",
		set:  integer(func(c *Config) *int { return &c.OTARate }, 0, 10_000_000)},
	{name: "ota-burst", group: groupDevices, def: "5000",
		help: "OTA and activation requests that one client address may make at once.",
		set:  integer(func(c *Config) *int { return &c.OTABurst }, 1, 10_000_000)},
	// A refused device tries again after 10, 20, 40 ... s: 600 new ones are in at once, 2,000 within half an hour.
	{name: "new-members-per-address", group: groupDevices, def: "60",
		help: "Unknown devices per minute from one client address (IPv6: one /64), ten times as many at once; 0: no limit.",
		more: "Set 0 for the day on which a large site is installed. See [limits](../limits.md).",
		set:  integer(func(c *Config) *int { return &c.NewMembersPerAddress }, 0, 1_000_000)},

	{name: "members-limit", group: groupDevices, def: "1000000",
		help: "Members that the fleet may have; further devices are answered 503 at their OTA check.",
		set:  integer(func(c *Config) *int { return &c.MembersLimit }, 1, 100_000_000)},

	{name: "device-auth", group: groupAccess, def: "token",
		help: "token: devices must present what the OTA reply gave them; none: any device may connect (loopback and lab use).",
		set:  choice(func(c *Config) *string { return &c.DeviceAuth }, "token", "none")},
	{name: "admission", group: groupAccess, def: "open",
		help: "open: an unknown device becomes a fleet member at its first OTA check; approve: it gets an activation code and waits.",
		more: "See [who may join](../devices.md#who-may-join).",
		set:  choice(func(c *Config) *string { return &c.Admission }, "open", "approve")},
	{name: "api-auth", group: groupAccess, def: "token",
		help: "token, or none (refused unless the API listens on loopback).",
		set:  choice(func(c *Config) *string { return &c.APIAuth }, "token", "none")},
	{name: "console", group: groupAccess, def: "true",
		help: "true: serve the web console at /console/ of the API listener; false: leave it out.",
		more: "See [the console](../console.md).",
		set:  boolean(func(c *Config) *bool { return &c.Console })},
	{name: "mcp-hosts", group: groupAccess, def: "",
		help: "Host names (comma-separated) under which MCP hosts reach the API, beside localhost and addresses.",
		more: "See [who gets in](../mcp.md#who-gets-in).",
		set:  list(func(c *Config) *[]string { return &c.MCPHosts }, checkHost)},
	{name: "mcp-origins", group: groupAccess, def: "",
		help: "Web pages (comma-separated, as scheme://host[:port]) that may use MCP, beside those of this machine.",
		more: "CORS is answered for them: [who gets in](../mcp.md#who-gets-in).",
		set:  list(func(c *Config) *[]string { return &c.MCPOrigins }, checkOrigin)},
	{name: "public-api-url", group: groupAccess, def: "",
		help: "URL under which hosts of language models reach this API, such as https://fleet.example.org, without a path; empty: hosts use API keys alone.",
		more: "It switches on the authorization server and counts as one of --mcp-hosts. The same on every node. See [hosts that log in](../mcp.md#hosts-that-log-in).",
		set:  optional(func(c *Config) *string { return &c.PublicAPIURL }, checkPublicAPIURL)},
	{name: "oauth", group: groupAccess, def: "true",
		help: "true: hosts log in with OAuth if --public-api-url is given; false: they use API keys alone.",
		set:  boolean(func(c *Config) *bool { return &c.OAuth })},
	{name: "oauth-cimd", group: groupAccess, def: "true",
		help: "true: a host may name itself by the URL of a document, which the node fetches; false: hosts register, for nodes without a way to the Internet.",
		set:  boolean(func(c *Config) *bool { return &c.OAuthCIMD })},
	{name: "oauth-hosts", group: groupAccess, def: "*",
		help: "Who may ask to be allowed: globs (comma-separated) over the hosts of applications and of their redirects, such as claude.ai,*.openai.com,localhost.",
		set:  list(func(c *Config) *[]string { return &c.OAuthHosts }, checkHostGlob)},
	{name: "secret", group: groupAccess, def: "", private: true,
		help: "Key from which device credentials and the admin token derive, at least 16 characters; all nodes of one fleet share it; empty: kept in the data dir. Flags show in process lists: prefer the variable or the file.",
		set:  setSecret},
	{name: "secret-file", group: groupAccess, def: "",
		help: "File that holds the secret.",
		more: "White space around it is cut off.",
		set:  optional(func(c *Config) *string { return &c.SecretFile }, nil)},
	{name: "policy-file", group: groupAccess, def: "",
		help: "File with the rules of the tool guard (JSON, see docs/access.md), read again when it changes; empty: they are set through the API. The same on every node.",
		more: "Read again within a second of a change and at SIGHUP; a file that is not usable leaves the old rules in force. See [the policy](../access.md#the-policy).",
		set:  optional(func(c *Config) *string { return &c.PolicyFile }, nil)},
	{name: "webhook-allow", group: groupAccess, def: "",
		help: "Networks, addresses and names of hosts (comma-separated) to which webhooks may connect beside public addresses, such as 10.0.0.0/8,hooks.example.com. The same on every node.",
		more: "A name is allowed whatever it resolves to. See [webhooks](../webhooks.md#which-addresses).",
		set:  list(func(c *Config) *[]string { return &c.WebhookAllow }, checkWebhookAllow)},
	{name: "firmware-keys", group: groupAccess, def: "",
		help: "File with public keys of minisign: then every upload of firmware needs a signature by one of them; empty: none does. The same on every node.",
		more: "Read at the start. See [signed uploads](../firmware.md#signed-uploads).",
		set:  optional(func(c *Config) *string { return &c.FirmwareKeys }, nil)},

	{name: "voice-upstream", group: groupVoice, def: "", private: true,
		help: "ws:// or wss:// URL of a xiaozhi-compatible chat server that takes every conversation; empty: voice services attach over NATS.",
		more: "See [a chat server instead](../voice.md#a-chat-server-instead).",
		set:  optional(func(c *Config) *string { return &c.VoiceUpstream }, checkUpstream)},
	{name: "gateway-api-listen", group: groupVoice, def: "",
		help: "HTTP API of xiaozhi-mqtt-gateway, such as :8007, for consoles made for it; empty: none. Needs the signature key.",
		more: "See [from xiaozhi-mqtt-gateway](../howto/from-mqtt-gateway.md).",
		set:  optional(func(c *Config) *string { return &c.GatewayAPIListen }, checkListen)},
	{name: "gateway-signature-key", group: groupVoice, def: "", private: true,
		help: "MQTT_SIGNATURE_KEY of the gateway: devices may log in with the credentials it gave them.",
		set:  optional(func(c *Config) *string { return &c.GatewaySignatureKey }, nil)},
	{name: "gateway-server-secret", group: groupVoice, def: "", private: true,
		help: "SERVER_SECRET of the gateway: signs the token for the voice upstream.",
		set:  optional(func(c *Config) *string { return &c.GatewayServerSecret }, nil)},
	{name: "gateway-timeout", group: groupVoice, def: "5s",
		help: "How long the gateway API waits for a device.",
		set:  duration(func(c *Config) *time.Duration { return &c.GatewayTimeout }, 100*time.Millisecond, 5*time.Minute)},

	{name: "vision-url", group: groupVision, def: "", private: true,
		help: "Base URL of an OpenAI-compatible server, such as https://api.openai.com/v1, that answers the devices' questions about their photos (/chat/completions is appended); empty: a service on NATS does, if there is one.",
		more: "Without either, photos are stored and nothing more: [explaining photos](../events.md#explaining-photos).",
		set: func(c *Config, value string) error {
			c.VisionURL = strings.TrimRight(value, "/")
			if value == "" {
				return nil
			}
			return checkVision(c.VisionURL)
		}},
	{name: "vision-model", group: groupVision, def: "",
		help: "Model for the questions; empty: the server's own choice.",
		set:  optional(func(c *Config) *string { return &c.VisionModel }, checkLine)},
	{name: "vision-key", group: groupVision, def: "", private: true,
		help: "Bearer token of that server; empty: none. Flags show in process lists: prefer the variable.",
		more: "It goes to that address alone, through the proxy that `HTTPS_PROXY` names if it is set; redirects are not followed, and no log contains it.",
		set:  optional(func(c *Config) *string { return &c.VisionKey }, checkLine)},
	{name: "upload-min-rate", group: groupVision, def: "2KiB",
		help: "Bytes per second below which an upload of a photo is ended; 0: it may take 30 s at any rate.",
		more: "The first 5 s do not count.",
		set:  size(func(c *Config) *int64 { return &c.UploadMinRate }, 0)},

	{name: "photo-retention", group: groupKeep, def: "168h",
		help: "Age at which a stored photo is deleted.",
		set:  duration(func(c *Config) *time.Duration { return &c.PhotoRetention }, time.Minute, maxRetention)},
	{name: "photo-limit", group: groupKeep, def: "10GiB",
		help: "Size of all stored photos; the oldest go first.",
		more: "It may be lowered: the oldest photos over it are deleted. Photos are listed by an index in the database, which a node fills again at its start; while the database is away photos are taken and served, and not listed.",
		set:  size(func(c *Config) *int64 { return &c.PhotoLimit }, mib)},
	{name: "event-retention", group: groupKeep, def: "24h",
		help: "Age at which a stored event is deleted.",
		set:  duration(func(c *Config) *time.Duration { return &c.EventRetention }, time.Minute, maxRetention)},
	{name: "event-limit", group: groupKeep, def: "1GiB",
		help: "Size of all stored events but notifications; the oldest go first.",
		set:  size(func(c *Config) *int64 { return &c.EventLimit }, mib)},
	{name: "notification-limit", group: groupKeep, def: "1GiB",
		help: "Size of all stored notifications; the oldest go first.",
		set:  size(func(c *Config) *int64 { return &c.NotificationLimit }, mib)},
	{name: "history-retention", group: groupKeep, def: "9600h",
		help: "Age at which an entry of a device's tool history is deleted; its newest always stays.",
		set:  duration(func(c *Config) *time.Duration { return &c.HistoryRetention }, 24*time.Hour, maxRetention)},
	{name: "history-per-device", group: groupKeep, def: "100",
		help: "Entries kept of each device's tool history, 1 to 10000; the oldest go first.",
		set:  integer(func(c *Config) *int { return &c.HistoryPerDevice }, 1, 10_000)},
	{name: "catalog-retention", group: groupKeep, def: "168h",
		help: "How long after its last use a tool list is deleted that no device and no history entry names, at least 24h.",
		set:  duration(func(c *Config) *time.Duration { return &c.CatalogRetention }, 24*time.Hour, maxRetention)},
	{name: "audit-retention", group: groupKeep, def: "2160h",
		help: "Age at which an entry of the audit is deleted.",
		set:  duration(func(c *Config) *time.Duration { return &c.AuditRetention }, time.Hour, maxRetention)},
	{name: "catalog-memory", group: groupKeep, def: "128MiB",
		help: "Bytes of different tool lists in memory; those of offline devices are evicted first, and further ones are refused.",
		more: "With what Go's garbage collector leaves room for, the process takes up to twice as much for them. They are read from the database when needed; devices whose list was refused are tried again.",
		set:  size(func(c *Config) *int64 { return &c.CatalogMemory }, 16*mib)},
	{name: "recorder-memory", group: groupKeep, def: "64MiB",
		help: "Memory for what happened to devices, which explains failures; taken as needed, 0 turns it off.",
		more: "See [why is it offline](../troubleshooting.md).",
		set:  sizeOrNone(func(c *Config) *int64 { return &c.RecorderMemory }, mib)},

	{name: "firmware-limit", group: groupKeep, def: "32MiB",
		help: "Size of one firmware file, unpacked.",
		more: "See [firmware files](../firmware.md).",
		set:  size(func(c *Config) *int64 { return &c.FirmwareLimit }, mib)},
	{name: "firmware-storage", group: groupKeep, def: "2GiB",
		help: "Size of all stored firmware images; beyond it, further ones are refused.",
		more: "They are in NATS, and on the disk of each node that has served them.",
		set:  size(func(c *Config) *int64 { return &c.FirmwareStorage }, mib)},
	{name: "firmware-downloads", group: groupKeep, def: "64",
		help: "Devices that may have an offer or a download of a firmware image of this node at once; one address may have eight.",
		more: "A device beyond that gets its offer at a later check.",
		set:  integer(func(c *Config) *int { return &c.FirmwareDownloads }, 1, 4096)},

	{name: "log-level", group: groupLog, def: "info",
		help: "debug, info, warn or error; changeable at run time through the API.",
		more: "See [logs](../howto/monitoring.md#logs).",
		set:  choice(func(c *Config) *string { return &c.LogLevel }, "debug", "info", "warn", "error")},
	{name: "log-format", group: groupLog, def: "auto",
		help: "text, json, or auto: text on a terminal, else json.",
		set:  choice(func(c *Config) *string { return &c.LogFormat }, "auto", "text", "json")},
}

// maxRetention is ten years: more than anybody means, and far from overflowing a time.Duration.
const maxRetention = 10 * 365 * 24 * time.Hour

// Flag describes one setting for a command line.
type Flag struct {
	// Name is the flag without leading dashes, such as "device-listen".
	Name string
	// Env is its environment variable, such as "FLEETD_DEVICE_LISTEN".
	Env string
	// Group is the heading under which help lists it.
	Group string
	// Default is the value it has when not given; empty where the help text has the default.
	Default string
	// Help is one line or two for people; More is what the reference adds, in Markdown.
	Help, More string
}

// Flags returns all settings in the order in which help lists them.
func Flags() []Flag {
	flags := make([]Flag, len(settings))
	for i, s := range settings {
		flags[i] = Flag{Name: s.name, Env: envName(s.name), Group: s.group, Default: s.def, Help: s.help, More: s.more}
	}
	return flags
}

// fault writes the sentence for a value that was refused. A value with an @ may be a URL with a password in it.
func (s setting) fault(value string, reason error) error {
	if s.private || value == "" || strings.Contains(value, "@") {
		return fmt.Errorf("%s %w", mention(s.name), reason)
	}
	return fmt.Errorf("%s is %q but %w", mention(s.name), value, reason)
}
