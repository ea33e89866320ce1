"""Which of the cheap endpoints is taken: one file, one picker."""
