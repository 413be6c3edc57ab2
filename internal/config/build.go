//go:build !conformance

package config

// buildSettings are those of programs built for a purpose of their own.
var buildSettings []setting
