package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

const (
	dialTimeout = 3 * time.Second
	// clockTolerance is far longer than a request, and than the second to which an HTTP date is rounded.
	clockTolerance = 10 * time.Second
)

// Severities of a finding.
const (
	severityError   = "error"
	severityWarning = "warning"
)

type doctorCmd struct {
	MAC       string `name:"mac" help:"Show the reply to this device; without it, the reply to an unknown one." placeholder:"MAC"`
	jsonFlags `set:"per=, without the checks made here"`
	// Secrets prints what a device logs in with.
	Secrets bool `help:"Print the device's password and token, too."`
}

// errUnreachable is the end of a diagnosis with errors in it.
var errUnreachable = exitError{errors.New("devices cannot work with these settings; see the errors above"), exitRefused}

// Run prints what a device receives and what is wrong with it.
func (d *doctorCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	asked := a.now()
	diagnosis, err := c.Diagnose(ctx, d.MAC)
	if err != nil {
		return err
	}
	answered := a.now()
	if !d.Secrets {
		diagnosis.Raw, diagnosis.Reply = maskSecrets(diagnosis.Raw), maskSecrets(diagnosis.Reply)
	}
	findings := diagnosis.Findings
	if d.JSON {
		if err := printJSON(a.stdout, diagnosis.Raw); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(a.stdout, "OTA URL  %s\nDevice   %s\nStatus   %d\n\nReply to its OTA check:\n",
			cleantext.Line(diagnosis.OTAURL), cleantext.Line(diagnosis.Device), diagnosis.Status)
		if err := printJSON(a.stdout, diagnosis.Reply); err != nil {
			return err
		}
		findings = append(slices.Clone(findings), clientFindings(ctx, a, diagnosis, asked, answered)...)
		if diagnosis.Probe != nil {
			findings = append(findings, checkDownload(ctx, diagnosis.Probe)...)
		}
		if err := printFindings(a, findings); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(findings, func(f api.Finding) bool { return f.Severity == severityError }) {
		return errUnreachable
	}
	return nil
}

// secretMember matches the members of an OTA reply with which a device logs in.
var secretMember = regexp.MustCompile(`("(?:password|token)"\s*:\s*")[^"\\]+"`)

// maskSecrets replaces the password and the token in JSON: people show the output of doctor to others.
func maskSecrets(document []byte) []byte {
	return secretMember.ReplaceAll(document, []byte(`$1(hidden; --secrets shows it)"`))
}

func printFindings(a *app, findings []api.Finding) error {
	if len(findings) == 0 {
		fmt.Fprintln(a.stdout, "\nNothing found that makes a device unreachable.")
		return nil
	}
	fmt.Fprintln(a.stdout, "\nFindings:")
	var rows [][]string
	for _, f := range findings {
		rows = append(rows, []string{f.Severity, f.Setting, f.Message})
	}
	return aligned(a.stdout, "  ", rows, 0)
}

// clientFindings are the checks made from here: another place than the server, though not yet a device.
func clientFindings(ctx context.Context, a *app, d apiclient.Diagnosis, asked, answered time.Time) []api.Finding {
	var findings []api.Finding
	add := func(f api.Finding, ok bool) {
		// A finding of the server about a setting is not repeated.
		known := func(other api.Finding) bool {
			return other.Setting == f.Setting && other.Severity != "info"
		}
		if ok && !slices.ContainsFunc(d.Findings, known) && !slices.Contains(findings, f) {
			findings = append(findings, f)
		}
	}
	for _, target := range targets(d) {
		add(checkAddress(target.host, a.inContainer))
		add(checkReach(ctx, target))
	}
	add(checkClock(d.ServerTime, asked, answered))
	if d.PublicAPIURL != "" {
		findings = append(findings, checkPublicAPI(ctx, d.PublicAPIURL)...)
	}
	return findings
}

// target is an address that devices dial, and the settings that decide it.
type target struct {
	host, port       string
	tls              bool
	listen, announce string
}

// targets returns where the device checks for updates and where it connects, each once.
func targets(d apiclient.Diagnosis) []target {
	var reply struct {
		WebSocket struct {
			URL string `json:"url"`
		} `json:"websocket"`
		MQTT struct {
			Endpoint string `json:"endpoint"`
		} `json:"mqtt"`
	}
	// A reply that is not an object has no address; it is shown as it is.
	_ = json.Unmarshal(d.Reply, &reply)
	var found []target
	for _, address := range []string{d.OTAURL, reply.WebSocket.URL} {
		u, err := url.Parse(address)
		if err != nil || u.Hostname() == "" {
			continue
		}
		t := target{host: u.Hostname(), port: u.Port(), tls: u.Scheme == "https" || u.Scheme == "wss",
			listen: "--device-listen", announce: "--public-device-url"}
		switch {
		case t.port != "":
		case t.tls:
			t.port = "443"
		default:
			t.port = "80"
		}
		if !slices.Contains(found, t) {
			found = append(found, t)
		}
	}
	if host, port, _ := strings.Cut(reply.MQTT.Endpoint, ":"); host != "" {
		port = cmp.Or(port, mqttTLSPort)
		// The port alone decides (esp_mqtt.cc:27-32).
		found = append(found, target{host: host, port: port, tls: port == mqttTLSPort, listen: "--mqtt-listen", announce: "--public-mqtt"})
	}
	return found
}

// mqttTLSPort is where devices use TLS, and where they go if no port is named.
const mqttTLSPort = "8883"

var (
	dockerRange  = netip.MustParsePrefix("172.16.0.0/12")
	notDocker    = netip.MustParsePrefix("172.16.0.0/16") // Docker starts at 172.17
	overlayRange = netip.MustParsePrefix("10.0.0.0/8")
)

// checkAddress finds addresses that exist on one machine only.
func checkAddress(host string, inContainer bool) (api.Finding, bool) {
	finding := api.Finding{Severity: severityError, Setting: "--public-host"}
	ip, err := netip.ParseAddr(host)
	if strings.EqualFold(host, "localhost") || (err == nil && ip.IsLoopback()) {
		finding.Message = fmt.Sprintf("devices would dial %s, which is the device itself; give --public-host the address of this machine in the devices' network", host)
		return finding, true
	}
	if err != nil {
		return api.Finding{}, false
	}
	finding.Severity = severityWarning
	docker := dockerRange.Contains(ip) && !notDocker.Contains(ip)
	if docker || (inContainer && overlayRange.Contains(ip)) {
		finding.Message = fmt.Sprintf("devices would dial %s, which looks like the address of a container; if devices cannot reach it, give --public-host the address of the machine the container runs on", host)
		return finding, true
	}
	return api.Finding{}, false
}

// checkReach dials the address. A refusal means that nothing listens there; other failures may come from the network
// between here and there, which the devices need not share.
func checkReach(ctx context.Context, t target) (api.Finding, bool) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	address := net.JoinHostPort(t.host, t.port)
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		finding := api.Finding{Severity: severityWarning, Setting: t.listen,
			Message: fmt.Sprintf("%s, which devices dial, cannot be reached from here: %v", address, err)}
		if errors.Is(err, syscall.ECONNREFUSED) {
			finding.Severity = severityError
			finding.Message = fmt.Sprintf("nothing listens on %s, which devices dial; if the port moved or a proxy is in front, give %s", address, t.announce)
		}
		return finding, true
	}
	defer conn.Close()
	if !t.tls {
		return api.Finding{}, false
	}
	if err := tls.Client(conn, &tls.Config{ServerName: t.host}).HandshakeContext(ctx); err != nil {
		return api.Finding{Severity: severityError, Setting: t.announce,
			Message: fmt.Sprintf("TLS with %s fails, and devices trust public certificate authorities only: %v", address, err)}, true
	}
	return api.Finding{}, false
}

// checkClock compares the server's clock with that of this machine: devices take theirs from the server, and TLS fails on a device
// with a wrong clock. The server's time is between two of this machine's, and cut to whole seconds.
func checkClock(server, asked, answered time.Time) (api.Finding, bool) {
	if server.IsZero() {
		return api.Finding{}, false
	}
	var off time.Duration
	switch {
	case server.After(answered.Add(clockTolerance)):
		off = server.Sub(answered)
	case server.Before(asked.Add(-clockTolerance)):
		off = server.Sub(asked)
	default:
		return api.Finding{}, false
	}
	direction := "fast"
	if off < 0 {
		direction, off = "slow", -off
	}
	return api.Finding{Severity: severityWarning, Message: fmt.Sprintf(
		"the server's clock is %s %s by the clock of this machine; devices take their time from the server", off.Round(time.Second), direction)}, true
}

// checkPublicAPI fetches what hosts fetch before a person logs in, and what must not be there: the REST API and the metrics.
func checkPublicAPI(ctx context.Context, public string) (findings []api.Finding) {
	client := &http.Client{Timeout: dialTimeout, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	defer client.CloseIdleConnections()
	warn := func(text string, args ...any) {
		findings = append(findings, api.Finding{Severity: severityWarning, Setting: "--public-api-url", Message: fmt.Sprintf(text, args...)})
	}
documents:
	for _, document := range []struct{ path, member, want string }{
		{"/.well-known/oauth-protected-resource/mcp", "resource", public + "/mcp"}, // RFC 9728
		{"/.well-known/oauth-authorization-server", "issuer", public},              // RFC 8414
	} {
		status, _, body, err := fetchPublic(ctx, client, public+document.path)
		if err != nil {
			warn("hosts cannot log in: %s", unreachable(public, err))
			return findings
		}
		var members map[string]json.RawMessage
		var got string
		switch err := json.Unmarshal(body, &members); {
		case status != http.StatusOK || err != nil:
			warn("hosts cannot log in: %s answers with status %d, and not with the document of fleetd; let the proxy pass /mcp, /sse, /.well-known/oauth-* and /oauth/ to --mcp-listen", public+document.path, status)
			break documents
		case json.Unmarshal(members[document.member], &got) != nil || got != document.want:
			warn("hosts cannot log in: %s has the %s %q in place of %q; give every node the same --public-api-url, and let the name lead to this fleet", public+document.path, document.member, got, document.want)
			break documents
		case members["authorization_servers"] == nil: // --oauth=false
			break documents
		}
	}
	for _, path := range []string{"/metrics", "/v1/self"} {
		// Without a token, fleetd answers the one with text, and refuses the other with a problem document.
		status, kind, _, err := fetchPublic(ctx, client, public+path)
		if err == nil && (status == http.StatusOK || status == http.StatusUnauthorized && strings.HasPrefix(kind, "application/problem+json")) {
			warn("%s answers under the public name; let the name lead to --mcp-listen, which has MCP and the login alone", public+path)
		}
	}
	return findings
}

func fetchPublic(ctx context.Context, client *http.Client, address string) (status int, kind string, body []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return 0, "", nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", nil, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	return resp.StatusCode, resp.Header.Get("Content-Type"), body, err
}

// unreachable says why nothing answers at a public address, and what to do.
func unreachable(public string, err error) string {
	var certificate *tls.CertificateVerificationError
	var name *net.DNSError
	switch {
	case errors.As(err, &certificate):
		return fmt.Sprintf("the certificate of %s is not valid (%v); hosts trust public certificate authorities only", public, certificate.Err)
	case errors.As(err, &name):
		return fmt.Sprintf("the name in %s is not known here (%v); add it to the DNS", public, name)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Sprintf("nothing listens at %s; start the proxy that has the name", public)
	}
	return fmt.Sprintf("%s cannot be reached from here (%v); look whether a firewall lets hosts through", public, errors.Unwrap(err))
}

// isContainer looks for the file Docker puts into every container.
func isContainer(root string) bool {
	_, err := os.Stat(filepath.Join(root, ".dockerenv"))
	return err == nil
}
