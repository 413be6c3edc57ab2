// Package config turns flags and environment variables into one validated [Config].
//
// Every setting is one line of the table in settings.go: flag, default, help and check. The command line, the
// environment and `fleetd serve --help` are all made from that table, so they cannot disagree. The flag --x-y
// equals the environment variable FLEETD_X_Y; the flag wins. An empty environment variable counts as not set,
// because compose files pass unset variables on as empty ones.
//
// No other package reads the environment.
package config

import (
	"crypto/rand"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/mattn/go-isatty"
)

// Given reports whether the user gave the setting, as a flag or in the environment, rather than leaving its default.
// The name is the flag's, without dashes in front, such as "device-listen".
func (c *Config) Given(name string) bool { return c.given[name] }

// Load makes a Config. The flags map holds the flags that were given, by name without leading dashes; environ has the
// form of [os.Environ]. Settings absent from both take their defaults. The error is one sentence that names the
// setting, and never holds a secret.
func Load(flags map[string]string, environ []string) (*Config, error) {
	env, err := fromEnvironment(environ)
	if err != nil {
		return nil, err
	}
	for name := range flags {
		if !slices.ContainsFunc(settings, func(s setting) bool { return s.name == name }) {
			return nil, fmt.Errorf("there is no setting --%s", name)
		}
	}
	c := &Config{given: make(map[string]bool)}
	for _, s := range settings {
		value, given := flags[s.name]
		if !given {
			value, given = env[s.name]
		}
		if given {
			c.given[s.name] = true
		} else {
			value = s.def
		}
		if err := s.set(c, value); err != nil {
			return nil, s.fault(value, err)
		}
	}
	if err := c.checkTogether(); err != nil {
		return nil, err
	}
	if err := c.readSecret(); err != nil {
		return nil, err
	}
	c.resolve(environ)
	return c, nil
}

// checkTogether holds the rules that concern more than one setting.
func (c *Config) checkTogether() error {
	if c.NATSListen != "" && c.NATS != "embedded" {
		return fmt.Errorf("%s opens a port of the embedded NATS, so it needs %s to be embedded", mention("nats-listen"), mention("nats"))
	}
	if c.NATSReplicas > 1 && c.NATS == "embedded" {
		return fmt.Errorf("%s is %d, but %s is embedded, which is one server", mention("nats-replicas"), c.NATSReplicas, mention("nats"))
	}
	if c.APIAuth == "none" && !isLoopback(c.APIListen) {
		return fmt.Errorf("%s may be none only while %s is a loopback address such as 127.0.0.1:8080, not %q: anybody who reaches the port could command every device",
			mention("api-auth"), mention("api-listen"), c.APIListen)
	}
	if c.APIAuth == "none" && c.PublicAPIURL != "" {
		return fmt.Errorf("%s needs %s to be token: without keys there is nothing that hosts could be allowed", mention("public-api-url"), mention("api-auth"))
	}
	if c.MCPListen != "" && c.APIAuth == "none" {
		return fmt.Errorf("%s needs %s to be token: anybody who reaches the port could command every device", mention("mcp-listen"), mention("api-auth"))
	}
	c.OAuth = c.OAuth && c.PublicAPIURL != ""
	if u, err := url.Parse(c.PublicAPIURL); err == nil && u.Host != "" {
		c.MCPHosts = append(c.MCPHosts, u.Hostname())
	}
	if c.ProxyProtocol == "on" && len(c.TrustedProxies) == 0 {
		return fmt.Errorf("%s needs %s: headers are taken from these alone", mention("proxy-protocol"), mention("trusted-proxies"))
	}
	if (c.APITLSCert == "") != (c.APITLSKey == "") {
		missing, present := "api-tls-key", "api-tls-cert"
		if c.APITLSCert == "" {
			missing, present = present, missing
		}
		return fmt.Errorf("%s needs %s as well: TLS takes both the certificate and its key", mention(present), mention(missing))
	}
	if (c.DeviceTLSCert == "") != (c.DeviceTLSKey == "") {
		missing, present := "device-tls-key", "device-tls-cert"
		if c.DeviceTLSCert == "" {
			missing, present = present, missing
		}
		return fmt.Errorf("%s needs %s as well: TLS takes both the certificate and its key", mention(present), mention(missing))
	}
	if c.Secret != "" && c.SecretFile != "" {
		return fmt.Errorf("%s and %s are two ways to give the same key: give one of them", mention("secret"), mention("secret-file"))
	}
	if c.VisionURL == "" && c.VisionModel+c.VisionKey != "" {
		name := "vision-key"
		if c.VisionKey == "" {
			name = "vision-model"
		}
		return fmt.Errorf("%s needs %s: the server that it is for", mention(name), mention("vision-url"))
	}
	if c.MQTT == "off" && c.Transport == "mqtt" {
		if c.given["transport"] {
			return fmt.Errorf("%s is off, so %s must be websocket", mention("mqtt"), mention("transport"))
		}
		c.Transport = "websocket"
	}
	if u, err := url.Parse(c.MQTT); err == nil && u.Host != "" && c.PublicMQTT == "" && checkPublicMQTT(u.Host) != nil {
		return fmt.Errorf("%s names a broker that devices cannot dial, since they know no IPv6 address: give %s", mention("mqtt"), mention("public-mqtt"))
	}
	if c.GatewayAPIListen != "" && c.GatewaySignatureKey == "" {
		return fmt.Errorf("%s needs %s: the tokens of its callers are made with that key", mention("gateway-api-listen"), mention("gateway-signature-key"))
	}
	listeners := []struct{ name, address string }{
		{"device-listen", c.DeviceListen}, {"api-listen", c.APIListen}, {"nats-listen", c.NATSListen}, {"gateway-api-listen", c.GatewayAPIListen}, {"mcp-listen", c.MCPListen},
	}
	if c.MQTT == "embedded" {
		listeners = append(listeners, struct{ name, address string }{"mqtt-listen", c.MQTTListen})
		if c.DeviceTLSCert != "" {
			listeners = append(listeners, struct{ name, address string }{"mqtt-tls-listen", c.MQTTTLSListen})
		}
	}
	for i, a := range listeners {
		for _, b := range listeners[i+1:] {
			if overlap(a.address, b.address) {
				return fmt.Errorf("%s and %s both listen on %q: give one of them another port", mention(a.name), mention(b.name), b.address)
			}
		}
	}
	return nil
}

// readSecret loads the secret file, if one was given. Surrounding white space is cut off because editors and
// `echo` end files with a newline, which must not make two nodes of one fleet differ.
func (c *Config) readSecret() error {
	if c.SecretFile == "" {
		return nil
	}
	content, err := os.ReadFile(c.SecretFile)
	if err != nil {
		return fmt.Errorf("%s cannot be read: %w", mention("secret-file"), err)
	}
	c.Secret = strings.TrimSpace(string(content))
	if len(c.Secret) < minSecret {
		return fmt.Errorf("%s names the file %s, which holds %d characters; a secret needs at least %d",
			mention("secret-file"), c.SecretFile, len(c.Secret), minSecret)
	}
	if err := checkPlaceholder(c.Secret); err != nil {
		return fmt.Errorf("%s names the file %s, whose content %w", mention("secret-file"), c.SecretFile, err)
	}
	return nil
}

// resolve fills the values whose default depends on the machine or on chance.
func (c *Config) resolve(environ []string) {
	if c.Node == "" {
		c.Node = "n-" + strings.ToLower(rand.Text()[:6])
	}
	if c.DeviceTimezone = c.Timezone; c.Timezone == "" {
		c.DeviceTimezone = systemTimezone(environ)
	}
	if c.LogFormat == "auto" {
		c.LogFormat = "json"
		if isatty.IsTerminal(os.Stderr.Fd()) {
			c.LogFormat = "text"
		}
	}
}

// mention writes a setting the way errors name it: the flag, then its environment variable.
func mention(name string) string {
	return "--" + name + " (" + envName(name) + ")"
}

// isLoopback reports whether a host:port is reachable from this machine only.
func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// overlap reports whether two host:port addresses cannot both be listened on. Port 0 is a different port each time.
func overlap(a, b string) bool {
	hostA, portA, errA := net.SplitHostPort(a)
	hostB, portB, errB := net.SplitHostPort(b)
	if errA != nil || errB != nil || portA != portB || portA == "0" {
		return false
	}
	return hostA == hostB || isWildcard(hostA) || isWildcard(hostB)
}

func isWildcard(host string) bool {
	return host == "" || host == "0.0.0.0" || host == "::"
}
